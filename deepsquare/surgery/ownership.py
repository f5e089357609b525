"""Changes of single modules in a model that nothing else is to notice."""

from collections import Counter

from torch import nn

from deepsquare.surgery.insertion import SITE, is_watched
from deepsquare.surgery.trace import Graph


def is_exclusive(model: nn.Module, graph: Graph, module: nn.Module) -> bool:
    """Whether the module is called once, shares no parameter and has no hook, so that it can be changed alone."""
    owners: Counter[nn.Parameter] = Counter(p for m in model.modules() for p in m._parameters.values() if p is not None)
    shares = any(owners[parameter] > 1 for parameter in module.parameters())
    return graph.times_called[module] == 1 and not shares and not is_watched(module)


def replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace ``old`` by ``new`` everywhere in ``model``; an inserted module keeps its site."""
    if SITE in old.__dict__:
        setattr(new, SITE, old.__dict__[SITE])
    new.train(old.training)
    for parent in list(model.modules()):  # without ``new``, which may have ``old`` inside
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new
