"""Surgery: finding the sites of a CNN, adding techniques to them, removing these, folding for inference."""

from deepsquare.surgery.equip import EquipRecord, equip, equip_record, intact_record, is_folded, sites, unequip, unwrap
from deepsquare.surgery.fold import fold
from deepsquare.surgery.site import KINDS, PREFIX, Kind, Site, Sites
from deepsquare.surgery.techniques import TECHNIQUES, Technique, Term, format_spec, parse_spec

__all__ = [
    "KINDS", "PREFIX", "TECHNIQUES", "EquipRecord", "Kind", "Site", "Sites", "Technique", "Term", "equip",
    "equip_record", "fold", "format_spec", "intact_record", "is_folded", "parse_spec", "sites", "unequip", "unwrap",
]  # fmt: skip
