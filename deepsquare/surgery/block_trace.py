"""The data flow of one block's own ``forward``, as a ``torch.fx`` graph of its children's calls.

``torch.fx.symbolic_trace`` replaces methods of ``nn.Module`` itself while it runs, which another thread would notice,
and takes what it cannot see for constant. Here the block's ``forward`` runs on a copy whose children are stand-ins, and
whatever that forward reads of the block is recorded: the graph holds as long as this is the same. A forward that
depends on the input's values or shape, changes the block, or reads its parameters or other objects is not traced.
"""

import logging
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

log = logging.getLogger(__name__)
_INTERNAL = {"_modules", "_parameters", "_buffers"}  # what ``nn.Module.__getattr__`` looks into
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, FunctionType, BuiltinFunctionType, type)
_IN_PLACE = ("iadd", "isub", "imul", "itruediv")


class _NotTraceableError(Exception):
    """The forward does what a graph cannot hold."""


@dataclass
class BlockTrace:
    """The graph of a block's forward, None where a graph cannot hold it, and what it was made for."""

    graph: fx.Graph | None
    forward: Callable[..., Any]  # the one that was traced
    modules: dict[str, nn.Module] = field(default_factory=dict)  # that the graph calls, by path
    children: dict[nn.Module, tuple[nn.Module | None, ...]] = field(default_factory=dict)  # of the block, of containers
    reads: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)  # namespace, attribute, value

    def holds(self, forward: Callable[..., Any]) -> bool:
        """Whether a trace of ``forward`` would give this graph again. Runs at every call."""
        if forward is not self.forward:
            return False
        for module, children in self.children.items():
            if tuple(module._modules.values()) != children:
                return False
        return all(namespace.get(name, self) is value for namespace, name, value in self.reads)


def trace_block(block: nn.Module, base: type[nn.Module]) -> BlockTrace:
    """The data flow of ``base.forward`` on ``block``, which takes one tensor and returns one."""
    tracer = _Tracer(block)
    trace = BlockTrace(None, base.forward)
    trace.children[block] = tuple(block._modules.values())
    try:
        output = base.forward(_stand_in(block, base, trace, tracer), tracer.create_proxy("placeholder", "x", (), {}))
        if isinstance(output, Tensor):  # as a stand-in for a tensor says it is
            tracer.create_node("output", "output", (tracer.create_arg(output),), {})
            trace.graph = tracer.graph
    except Exception as error:  # whatever a forward raises on stand-ins, the block runs as it is written
        log.debug("%s is not traced: %s", base.__name__, error)
    return trace


class _Value(fx.Proxy):
    """A stand-in for a tensor in a block's forward."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return Tensor  # for ``isinstance``

    def __getattr__(self, name: str) -> "_Attribute":
        return _Attribute(self, name)

    def __repr__(self) -> str:
        raise _NotTraceableError("the forward prints a tensor")

    __str__ = __repr__


class _Attribute(fx.proxy.Attribute):
    __repr__ = __str__ = _Value.__repr__


def _in_place(name: str) -> Callable[[_Value, Any], Any]:
    function = getattr(operator, name)
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _name in _IN_PLACE:  # ``fx.Proxy`` would record ``a += b`` as ``a = a + b``
    setattr(_Value, f"__{_name}__", _in_place(_name))


class _Tracer(fx.Tracer):
    """Records a graph; refuses other tensors than the input's, and operations in another mode."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.root = root
        self.graph = fx.Graph(tracer_cls=fx.Tracer)
        self.tensor_attrs = {}
        self.modes = _modes()

    def proxy(self, node: fx.Node) -> _Value:
        return _Value(node, self)

    def create_arg(self, a: Any) -> Any:
        if issubclass(type(a), fx.Proxy):
            return a.node
        if isinstance(a, Tensor):
            raise _NotTraceableError("the forward uses a tensor that is not computed from its input")
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self.modes:
            raise _NotTraceableError("the forward switches gradients or autocast")
        return super().create_node(*args, **kwargs)


def _modes() -> tuple[Any, ...]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def _require_constant(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_require_constant, value)) and value
    if not isinstance(value, _CONSTANTS):
        raise _NotTraceableError(f"the forward reads an attribute of type {type(value).__name__}")
    return value


def _stand_in(block: nn.Module, base: type[nn.Module], trace: BlockTrace, tracer: _Tracer) -> Any:
    """A copy of ``block`` whose children are stand-ins, and which records what is read and refuses to be changed."""
    attributes = vars(block)

    def read(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name in attributes and name not in _INTERNAL:
            trace.reads.append((attributes, name, _require_constant(value)))
        return value

    def change(self: Any, name: str, value: Any = None) -> None:
        raise _NotTraceableError(f"the forward changes {name}")

    changes = {"__getattribute__": read, "__setattr__": change, "__delattr__": change}
    copy: Any = object.__new__(type(base.__name__, (base,), changes))
    children = {name: None if m is None else _Child(m, name, trace, tracer) for name, m in block._modules.items()}
    vars(copy).update(attributes, _modules=children)
    return copy


class _Child:
    """A stand-in for a module in a block: calling it adds a node; a ``Sequential`` runs its children in turn."""

    def __init__(self, module: nn.Module, path: str, trace: BlockTrace, tracer: _Tracer) -> None:
        vars(self)["_of"] = (module, path, trace, tracer)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(vars(self)["_of"][0])  # for ``isinstance``

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, path, trace, tracer = vars(self)["_of"]
        if type(module).forward is nn.Sequential.forward and len(args) == 1 and not kwargs:
            trace.modules[path] = module
            (value,) = args
            for child in self:
                value = child(value)
            return value
        trace.modules[path] = module
        return tracer.create_proxy("call_module", path, args, kwargs)

    def __iter__(self) -> Iterator["_Child"]:
        module, path, trace, tracer = vars(self)["_of"]
        if not isinstance(module, (nn.Sequential, nn.ModuleList)):
            raise _NotTraceableError(f"the forward iterates over a {type(module).__name__}")
        trace.children[module] = tuple(module._modules.values())
        return iter(
            [_Child(m, f"{path}.{name}", trace, tracer) for name, m in module._modules.items() if m is not None]
        )

    def __getattr__(self, name: str) -> Any:
        module, path, trace, tracer = vars(self)["_of"]
        child = module._modules.get(name)
        if child is not None:
            trace.children[module] = tuple(module._modules.values())
            return _Child(child, f"{path}.{name}", trace, tracer)
        if name not in vars(module):
            raise _NotTraceableError(f"the forward reads {name} of {path}")
        trace.reads.append((vars(module), name, _require_constant(vars(module)[name])))
        return vars(module)[name]

    def __setattr__(self, name: str, value: Any) -> None:
        raise _NotTraceableError(f"the forward changes {name} of a child")
