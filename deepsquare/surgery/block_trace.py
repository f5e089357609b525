"""The data flow of one block's own ``forward``, as a ``torch.fx`` graph of its children's calls.

``torch.fx.symbolic_trace`` replaces methods of ``nn.Module`` itself while it runs, which another thread would notice,
and takes what it cannot see for constant. Here the block's ``forward`` runs on a copy whose children are stand-ins, and
whatever that forward reads of the block, its class and global variables is recorded: the graph holds as long as this is
the same. A forward that depends on the input's values or shape, draws random numbers, changes the block, or reads its
parameters or other objects is not traced.
"""

import dis
import logging
import operator
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn

log = logging.getLogger(__name__)
_INTERNAL = {"_modules", "_parameters", "_buffers"}  # what ``nn.Module.__getattr__`` looks into
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, FunctionType, BuiltinFunctionType, type)
# Packages whose values are taken as they are.
_KNOWN = {"builtins", "torch", "math", "operator", "typing", "warnings", "random", "numpy"}
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
    # Namespace, name and value; the trace itself stands for a name that is not there.
    reads: list[tuple[Mapping[str, Any], str, Any]] = field(default_factory=list)

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
    before = _random_states()
    try:
        _read_globals(base.forward, trace, set())
        output = base.forward(_stand_in(block, base, trace, tracer), tracer.create_proxy("placeholder", "x", (), {}))
        if isinstance(output, Tensor):  # as a stand-in for a tensor says it is
            tracer.create_node("output", "output", (tracer.create_arg(output),), {})
            trace.graph = tracer.graph
        if not _same(_random_states(), before):
            trace.graph = None
            raise _NotTraceableError("the forward draws random numbers")
    except Exception as error:  # whatever a forward raises on stand-ins, the block runs as it is written
        log.debug("%s is not traced: %s", base.__name__, error)
        _restore(before)
    return trace


def _random_states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state(legacy=False)


def _same(states: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return torch.equal(states[0], others[0]) and states[1] == others[1] and str(states[2]) == str(others[2])


def _restore(states: tuple[Any, ...]) -> None:
    """Undo what a trace that is not used has drawn."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if states[2] is not None:
        sys.modules["numpy"].random.set_state(states[2])


def _read_globals(function: Any, trace: BlockTrace, seen: set[CodeType]) -> None:
    """Record the global variables that a function reads, and those of the functions that it may call."""
    if not isinstance(function, FunctionType):
        raise _NotTraceableError(f"{function!r} is not a Python function")
    code = function.__code__
    if code in seen:
        return
    seen.add(code)
    for cell in function.__closure__ or ():
        _read_value(cell.cell_contents, trace, seen)
    for name in _global_names(code):
        if name in function.__globals__:
            value = function.__globals__[name]
            if _read_value(value, trace, seen):
                trace.reads.append((function.__globals__, name, value))


def _read_value(value: Any, trace: BlockTrace, seen: set[CodeType]) -> bool:
    """Whether a value of a global variable or closure may be another at the next call."""
    owner = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    if isinstance(owner, str) and owner.partition(".")[0] in _KNOWN:
        return False
    if isinstance(value, ModuleType):
        raise _NotTraceableError(f"the forward reads the module {value.__name__}")
    if isinstance(value, FunctionType):
        _read_globals(value, trace, seen)
    _require_constant(value)
    return True


def _global_names(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


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
        elif name not in attributes and not name.startswith("__"):
            _read_of_class(base, name, trace)
        return value

    def change(self: Any, name: str, value: Any = None) -> None:
        raise _NotTraceableError(f"the forward changes {name}")

    changes = {"__getattribute__": read, "__setattr__": change, "__delattr__": change}
    copy: Any = object.__new__(type(base.__name__, (base,), changes))
    children = {name: None if m is None else _Child(m, name, trace, tracer) for name, m in block._modules.items()}
    vars(copy).update(attributes, _modules=children)
    return copy


def _read_of_class(base: type[nn.Module], name: str, trace: BlockTrace) -> None:
    """Record a method or value of the class, and that no class before its own has it."""
    for cls in base.__mro__:
        namespace = vars(cls)
        if cls.__module__.partition(".")[0] in _KNOWN:
            return
        trace.reads.append((namespace, name, namespace.get(name, trace)))
        if name in namespace:
            _read_value(getattr(namespace[name], "__func__", namespace[name]), trace, set())  # of a static method
            return


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
