"""Surgery: finding the sites of a CNN, equipping it, taking the equipment off, folding it for the test phase."""

from deepsquare.surgery.folding import fold
from deepsquare.surgery.insertion import PREFIX
from deepsquare.surgery.operation import (
    EquipRecord,
    check_intact,
    equip,
    equip_record,
    is_folded,
    refuse_inner,
    sites,
    unequip,
    unwrap,
)
from deepsquare.surgery.site import KINDS, Kind, Site, Sites
from deepsquare.surgery.techniques import TECHNIQUES, Technique, Term, format_spec, parse_spec

__all__ = [
    "KINDS",
    "PREFIX",
    "TECHNIQUES",
    "EquipRecord",
    "Kind",
    "Site",
    "Sites",
    "Technique",
    "Term",
    "check_intact",
    "equip",
    "equip_record",
    "fold",
    "format_spec",
    "is_folded",
    "parse_spec",
    "refuse_inner",
    "sites",
    "unequip",
    "unwrap",
]
