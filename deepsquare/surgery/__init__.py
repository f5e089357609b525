"""Surgery: finding the sites of a CNN, adding techniques to them, removing these, folding for inference."""

from deepsquare.surgery.equip import (
    EquipRecord,
    equip,
    equip_record,
    intact_record,
    is_folded,
    refuse_sharded,
    set_beta,
    sites,
    unequip,
    unwrap,
)
from deepsquare.surgery.fold import fold
from deepsquare.surgery.insertion import INITS, PREFIX, Init
from deepsquare.surgery.param_groups import param_groups
from deepsquare.surgery.site import KINDS, Kind, Site, Sites
from deepsquare.surgery.spec import Term, format_spec, parse_spec
from deepsquare.surgery.spec_key import is_spec_key, spec_key
from deepsquare.surgery.techniques import TECHNIQUES, Technique

__all__ = [
    "INITS", "KINDS", "PREFIX", "TECHNIQUES", "EquipRecord", "Init", "Kind", "Site", "Sites", "Technique", "Term",
    "equip", "equip_record", "fold", "format_spec", "intact_record", "is_folded", "is_spec_key", "param_groups",
    "parse_spec", "refuse_sharded", "set_beta", "sites", "spec_key", "unequip", "unwrap",
]  # fmt: skip
