"""Stand-ins for packages that a bare machine lacks, so that the engine runs with numpy and JAX.

    stand_ins.install()     # before anything of pallas_kernels or jaxpaged is loaded

What is installed is used as it is. Of the rest:

- jaxtyping: its names give back the array's type; annotations say nothing then.
- flax: the part of `flax.nnx` that the decoder uses, which is a container of arrays: modules,
  split into a structure and a tree of arrays, and put together again.
- tokenizers, jinja2, platformdirs: the engine loads them and, without a checkpoint, never calls
  them. Their names can be loaded and inherited from; whatever is called says what is missing.
"""

import collections
import collections.abc
import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any, NoReturn

import jax

INERT = ("tokenizers", "jinja2", "platformdirs")
"""Packages that are loaded and not called."""

Path = tuple[str | int, ...]


def install() -> tuple[str, ...]:
    """Puts stand-ins where packages are missing; their names."""
    makers = {"jaxtyping": _jaxtyping, "flax": _flax}
    missing = tuple(name for name in (*makers, *INERT) if _is_missing(name))
    for name in missing:
        if name in makers:
            sys.modules |= makers[name]()
    inert = frozenset(missing) & frozenset(INERT)
    if inert:
        sys.meta_path.insert(0, _InertFinder(inert))
    return missing


def _is_missing(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except (ImportError, ValueError):
        return True


class _InertFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds inert modules under the names of packages."""

    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A package for every name inside of the packages."""
        if fullname.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """An inert module."""
        return _InertModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


class _InertModule(types.ModuleType):
    """A module in which every name is a class that cannot be called."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(f"stand-in for {self.__name__} has no {name}")
        made = type(name, (_Inert,), {"stands_for": f"{self.__name__}.{name}"})
        setattr(self, name, made)
        return made


class _Inert(Exception):
    """What stands for any name of a package that is not there; for exceptions, too."""

    stands_for = ""

    def __new__(cls, *_: object, **__: object) -> NoReturn:
        package = cls.stands_for.partition(".")[0]
        raise ModuleNotFoundError(
            f"{cls.stands_for} was called, and {package} is not installed; a stand-in was loaded "
            f"for it; pip install {package}",
            name=package,
        )


class Annotation:
    """An array annotation without content: `Float[Array, "T D"]` is `Array`."""

    def __class_getitem__(cls, item: tuple[Any, str]) -> Any:  # noqa: ANN401
        """The array's type."""
        return item[0]


def _jaxtyping() -> dict[str, types.ModuleType]:
    module = types.ModuleType("jaxtyping", "Stands in for jaxtyping.")
    names = ("Bool", "Float", "Int", "Num", "Shaped", "UInt", "UInt32")
    module.__dict__.update(dict.fromkeys(names, Annotation), Array=jax.Array)
    return {"jaxtyping": module}


class Param:
    """An array that belongs to a module."""

    def __init__(self, value: Any) -> None:  # noqa: ANN401
        self._value = value

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401
        """The array with `[...]`, otherwise a part of it."""
        return self._value if index is Ellipsis else self._value[index]

    def get_value(self) -> Any:  # noqa: ANN401
        """The array."""
        return self._value

    def replace(self, value: Any) -> "Param":  # noqa: ANN401
        """The same with another array."""
        return Param(value)


class Module:
    """Whatever has arrays, or modules, among its attributes."""


class List(collections.UserList[Any], Module):
    """Modules in order."""


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """Arrays by the path of attributes that leads to them.

    Attributes:
        arrays: In the order of their paths.
    """

    arrays: dict[Path, Any]

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[Path, ...]]:
        """Arrays with their keys, and all paths."""
        leaves = [
            (jax.tree_util.DictKey(".".join(map(str, path))), array)
            for path, array in self.arrays.items()
        ]
        return leaves, tuple(self.arrays)

    @classmethod
    def tree_unflatten(
        cls, paths: tuple[Path, ...], arrays: collections.abc.Iterable[Any]
    ) -> "State":
        """The inverse."""
        return cls(dict(zip(paths, arrays, strict=True)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GraphDef:
    """A module without its arrays.

    Attributes:
        kind: Its class.
        modules: The modules in it, by attribute, or by place in a list.
        params: Attributes, or places, that are arrays.
        statics: All other attributes, with their values.
    """

    kind: type
    modules: tuple[tuple[str | int, "GraphDef"], ...]
    params: tuple[str | int, ...]
    statics: tuple[tuple[str, Any], ...]


def split(module: Any) -> tuple[GraphDef, State]:  # noqa: ANN401
    """A module's structure and its arrays."""
    arrays: dict[Path, Any] = {}
    graph = _graph(module, (), arrays)
    # As flax does: programs then take their arguments in the same order.
    return graph, State(dict(sorted(arrays.items(), key=lambda item: item[0])))


def _graph(module: Any, path: Path, arrays: dict[Path, Any]) -> GraphDef:  # noqa: ANN401
    parts = enumerate(module) if isinstance(module, List) else vars(module).items()
    modules: list[tuple[str | int, GraphDef]] = []
    params: list[str | int] = []
    statics: list[tuple[str, Any]] = []
    for name, part in parts:
        if isinstance(part, Param):
            params.append(name)
            arrays[*path, name] = part.get_value()
        elif isinstance(part, Module):
            modules.append((name, _graph(part, (*path, name), arrays)))
        else:
            statics.append((str(name), part))
    return GraphDef(
        kind=type(module), modules=tuple(modules), params=tuple(params), statics=tuple(statics)
    )


def merge(graph: GraphDef, state: State) -> Any:  # noqa: ANN401
    """The module that `split` took apart."""
    return _module(graph, (), state.arrays)


def _module(graph: GraphDef, path: Path, arrays: dict[Path, Any]) -> Any:  # noqa: ANN401
    parts: dict[Any, Any] = dict(graph.statics)
    parts |= {name: _module(part, (*path, name), arrays) for name, part in graph.modules}
    parts |= {name: Param(arrays[*path, name]) for name in graph.params}
    if issubclass(graph.kind, List):
        return graph.kind([parts[place] for place in sorted(parts)])
    module = object.__new__(graph.kind)
    vars(module).update(parts)
    return module


def eval_shape(build: collections.abc.Callable[[], Any]) -> Any:  # noqa: ANN401
    """The module that `build` makes, with shapes and dtypes instead of arrays."""
    graphs: list[GraphDef] = []

    def arrays() -> State:
        graph, state = split(build())
        graphs.append(graph)
        return state

    abstract = jax.eval_shape(arrays)
    return merge(graphs[-1], abstract)


def to_flat_state(state: State) -> list[tuple[Path, Param]]:
    """Paths and arrays."""
    return [(path, Param(array)) for path, array in state.arrays.items()]


def from_flat_state(flat: collections.abc.Iterable[tuple[Path, Param]]) -> State:
    """The inverse of `to_flat_state`."""
    return State({path: param.get_value() for path, param in flat})


def _flax() -> dict[str, types.ModuleType]:
    nnx = types.ModuleType("flax.nnx", "Stands in for flax.nnx.")
    parts = (GraphDef, List, Module, Param, State)
    functions = (eval_shape, from_flat_state, merge, split, to_flat_state)
    nnx.__dict__.update({part.__name__: part for part in (*parts, *functions)}, Variable=Param)
    package = types.ModuleType("flax", "Stands in for flax.")
    package.__dict__.update(nnx=nnx, __path__=[])
    return {"flax": package, "flax.nnx": nnx}
