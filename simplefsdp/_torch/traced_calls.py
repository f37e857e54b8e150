"""Handles a call of a layer while Dynamo traces: traces it, or reuses the trace of another layer.

See ``repeated_calls.py``. This file imports the parts of Dynamo that implement
``nested_compile_region``; ``trace_once.py`` says which versions of torch have them.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._dynamo.exc import RestartAnalysis, UnspecializeRestartAnalysis
from torch._dynamo.guards import GUARD_VALUE_DISPATCH, GuardBuilder, install_guard
from torch._dynamo.source import ConstDictKeySource, is_from_local_source
from torch._dynamo.variables import invoke_subgraph
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.tensor import NumpyNdarrayVariable
from torch._guards import Source
from torch.fx import GraphModule, Node
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from simplefsdp._torch.changed_state import State, bases, changes, held_by, hold_alike
from simplefsdp._torch.dynamo import has_policy, with_own_code
from simplefsdp._torch.exact import exactly, is_plain
from simplefsdp._torch.repeated_calls import INSIDE, LAYER, REFUSED, kind_of
from simplefsdp._torch.tensors import layout_of

_invoke_subgraph = torch.ops.higher_order.invoke_subgraph
_TAGS = invoke_subgraph.InputTag
_OWN = (_TAGS.OBJECT, _TAGS.CONSTANT)  # tags of arguments that are no tensors
_EQUAL = ("CONSTANT_MATCH", "EQUALS_MATCH")  # guards that compare a constant
log = logging.getLogger("simplefsdp")

_MOST_KINDS = 4
"""Traces that are kept for one kind of layer. If more differ, each layer is probably made to differ
(by its own number, say), and all layers of that kind are traced."""

_TRACED = "_simplefsdp_traced_calls"


@functools.cache
def _caller(kind: object) -> Any:
    """A function that calls a layer. It has its own code, because torch files calls by code."""

    def call_layer(layer: Any, *args: Any, **kwargs: Any) -> Any:
        return layer(*args, **kwargs)

    return with_own_code(call_layer, "call of a layer")


def called(layer: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a call of ``layer``, as a Dynamo variable: by tracing the call, or by reusing
    the trace of another layer."""
    kind = kind_of(layer.value)
    known = tx.output.__dict__.setdefault(_TRACED, {}).setdefault(kind, [])
    arguments = [layer, *args]
    try:
        changed = changes(tx)
        if len(known) < _MOST_KINDS:
            found = invoke_subgraph.build_input_fingerprint(tx, arguments, kwargs)
            _refuse_tensors(tx, [vt for tag, vt in found.flat_vts if tag is _TAGS.TENSOR])
            given = [*map(tx.output.resolve_source_value, _sources_of(found, *_TAGS))]
            held = held_by(given)
            # Guards are checked on the real objects, which do not have the changes of traced code.
            if any(id(change.owner) in held for change in changed):
                raise LookupError("the layer, or an argument, holds what is changed before it")
            for traced in known:
                state = traced.state
                state_is_alike = changed == state.changed and hold_alike(state, given, held)
                if state_is_alike and _is_like(tx, traced, found, layer.value):
                    result = invoke_subgraph.stamp_out_subgraph(tx, found, traced.entry)
                    _guard_as(tx, traced, found.arg_sources)
                    _note_layer(tx, layer)
                    return result
            function = UserFunctionVariable(_caller(kind))
            result = _call_traced(tx, function, arguments, kwargs)
            if changes(tx) != changed:
                raise LookupError("a layer changes what was there before")
            state = State(changed, given, held, _global_values(tx, found, held))
            known.append(_last_traced(tx, function, found, layer.value, state))
            known[-1].entry.body_gmod.meta.setdefault(LAYER, _note_layer(tx, layer))
            return result
        why = "they differ"
    except RestartAnalysis:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    REFUSED.add(kind)
    log.debug("Dynamo follows all layers of class %s: %s", type(layer.value).__name__, why)
    raise UnspecializeRestartAnalysis(restart_reason="layers that are not alike")


def _refuse_tensors(tx: Any, tensors: Sequence[Any]) -> None:
    """Refuse tensors that may tell layers apart by more than their layout."""
    _refuse_subclasses(vt.as_proxy().node.meta.get("example_value") for vt in tensors)
    if any(isinstance(vt, NumpyNdarrayVariable) for vt in tensors):
        raise LookupError("numpy's arrays or numbers go from layer to layer")
    if any(vt in tx.output.side_effects.store_attr_mutations for vt in tensors):
        raise LookupError("an attribute was set on a tensor that goes from layer to layer")


def _refuse_subclasses(values: Iterable[Any]) -> None:
    if any(map(is_traceable_wrapper_subclass, values)):
        raise LookupError("tensors that hold others go from layer to layer")


def _sharing(found: Any) -> list[tuple[int, int | None]]:
    """For each tensor or symbolic argument of a call, the index of the first one that is the same,
    because torch makes one input of arguments that are the same. And if it is a view, the index of
    the argument that it is a view of, or -1."""
    given = (_TAGS.TENSOR, _TAGS.SYMNODE)
    nodes = [v.as_proxy().node for tag, v in found.flat_vts if tag in given]
    values = [node.meta.get("example_value") for node in nodes]

    def base(value: Any) -> int | None:
        if not isinstance(value, torch.Tensor) or not value._is_view():
            return None
        return next((i for i, other in enumerate(values) if other is value._base), -1)

    return list(zip(map(nodes.index, nodes), map(base, values), strict=True))


def _described(layer: nn.Module) -> list[object]:
    """The layouts of a layer's parameters and buffers, and the attribute names of its modules, in
    order. Not all of this is guarded, so layers are compared by it, too."""
    some = (layer.named_parameters, layer.named_buffers)
    named = itertools.chain.from_iterable(of(remove_duplicate=False) for of in some)
    tensors = [(name, t.is_leaf, layout_of(t)) for name, t in named]
    return [*tensors, *((name, list(vars(m))) for name, m in layer.named_modules())]


class _Asked(NamedTuple):
    """A guard of a traced layer that is to be checked for other layers."""

    source: Any
    guard: Any
    check: Any  # torch's check of another layer's value against ``noted``
    noted: Any  # what torch noted of the traced layer's value
    exact: Any  # the traced layer's value if it is a constant, since torch takes 1 for True

    def holds(self, value: Any) -> bool:
        """Whether the guard holds for ``value``, which another layer has in the same place."""
        return self.exact == _exact(self.guard, value) and self.check.eval_fn(value, self.noted)


def _exact(guard: Any, value: Any) -> Any:
    name = guard.create_fn_name()
    known = name in _EQUAL or (is_plain(value) and name != "TYPE_MATCH")
    return exactly(value) if known else type(value)


class _Traced(NamedTuple):
    """A layer that Dynamo has traced."""

    condition: Any  # torch's condition for reusing the trace, without its guards
    entry: Any  # torch's cache entry, which holds the graph
    sharing: list[tuple[int, int | None]]  # see :func:`_sharing`
    described: list[object]  # see :func:`_described`
    guards: tuple[_Asked, ...]  # the guards on the layer's own sources
    # Pairs of sources that are one object; torch does not check that for another call.
    same: tuple[tuple[Any, Any], ...]
    state: State  # see :class:`State`


def _call_traced(tx: Any, function: Any, arguments: list[Any], kwargs: dict[str, Any]) -> Any:
    call = invoke_subgraph.InvokeSubgraphHigherOrderVariable(_invoke_subgraph)
    tx.output.__dict__[INSIDE] = True
    try:
        return call._call_function(tx, [function, *arguments], kwargs)
    finally:
        del tx.output.__dict__[INSIDE]


def _last_traced(tx: Any, function: Any, found: Any, layer: nn.Module, state: State) -> _Traced:
    """The call that was just traced: what torch remembers of it, and what we add. Raises a
    LookupError if guards do not cover everything that the trace depends on."""
    caches = tx.output.tracing_context.hop_dispatch_set_cache
    calls = caches.get_cache(_invoke_subgraph).subgraph_reuse_cache
    # Taken out of torch's cache, which torch would search at the next call: `_is_like` decides.
    entries = calls.pop(function.get_function().__code__, ())
    if len(entries) != 1:
        raise LookupError("its inputs, outputs or side effects cannot be compared")
    ((condition, entry),) = entries
    bodies = [m for m in entry.body_gmod.modules() if isinstance(m, GraphModule)]
    if any(map(has_policy, bodies)):
        raise LookupError("a policy of what is checkpointed may count layers")
    _refuse_subclasses(_last_call(tx).meta["example_value"])
    guards, same = _own_guards(tx, found, entry)
    return _Traced(
        replace(condition, guards=[], traced_sources=OrderedSet()),
        entry,
        _sharing(found),
        _described(layer),
        guards,
        same,
        state,
    )


def _own_guards(tx: Any, found: Any, entry: Any) -> tuple[Any, Any]:
    """All guards on a layer's own sources, and pairs of sources that are one object. torch itself
    remembers neither reads in a region inside the layer, nor hooks. Raises a LookupError if a guard
    cannot be checked for another layer."""
    own = _Moved(dict.fromkeys(_sources_of(found, *_OWN)))
    lifted = invoke_subgraph.LiftedCapturedSource
    captured = _Moved(
        dict.fromkeys(x.source for x in entry.subgraph_input_mapping if isinstance(x, lifted))
    )
    tensors = set(_sources_of(found, _TAGS.TENSOR))
    guards, same = [], []
    for guard in tx.output.guards:
        source, name = guard.originating_source, guard.create_fn_name()
        if tensors.intersection(bases(getattr(source, "base", None))):
            raise LookupError("an attribute of a tensor is read")
        if not own.concerns(source):
            continue
        if name == "DUPLICATE_INPUT":
            same.append((source, guard.create_fn.keywords["source_b"]))
            continue
        asked: Any = GUARD_VALUE_DISPATCH.get(name)
        if not hasattr(asked, "eval_fn"):
            raise LookupError(f"what {name} guards cannot be asked of another layer")
        if name == "TENSOR_MATCH" and not captured.concerns(source):
            raise LookupError("of a tensor only its layout is read")  # and nobody would guard it
        value = tx.output.resolve_source_value(source)
        noted = asked.get_metadata_fn(guard, value)
        guards.append(_Asked(source, guard, asked, noted, _exact(guard, value)))
    return tuple(guards), tuple(same)


def _sources_of(found: Any, *tags: Any) -> list[Any]:
    """The sources of those arguments of a call that have a source, and one of ``tags``."""
    pairs = zip(found.arg_sources, found.flat_vts, strict=True)
    return [source for source, (tag, _) in pairs if source is not None and tag in tags]


def _global_values(tx: Any, found: Any, held: Mapping[int, object]) -> dict[int, object]:
    """The objects that guarded globals hold, except globals through which the layer was reached.
    Raises a LookupError as :func:`held_by` does, or if a global is read by a key that the layer
    holds."""
    own = _Moved(dict.fromkeys(_sources_of(found, *_OWN)))
    above = {base for source in own.known for base in bases(source)}
    value_of, values = tx.output.resolve_source_value, []

    @functools.cache
    def is_shared(source: Any) -> bool:
        """Whether it is, or is read through, a class or a module, which all layers have."""
        base = getattr(source, "base", None)
        if base is not None and is_shared(base):
            return True
        return bool(source.name) and isinstance(value_of(source), (type, ModuleType))

    for guard in tx.output.guards:
        source = guard.originating_source
        keys = (getattr(base, "index", None) for base in bases(source))
        if any(isinstance(k, ConstDictKeySource) and id(value_of(k)) in held for k in keys):
            raise LookupError("what is read by a key that a layer holds may differ for others")
        known = source in above or own.concerns(source) or is_from_local_source(source)
        if source.name and (not known or is_shared(source)):
            values.append(value_of(source))
    return held_by(values)


class _Moved:
    """Translates sources of one layer into those of another; each result is cached."""

    def __init__(self, becomes: Mapping[Any, Any]) -> None:
        self.known = dict(becomes)

    def concerns(self, source: Any) -> bool:
        """Whether ``source`` begins at one of the layer's sources."""
        return any(base in self.known for base in bases(source))

    def __call__(self, source: Any) -> Any:
        if source not in self.known:
            parts = {f.name: getattr(source, f.name) for f in fields(source) if f.init}
            moved = {k: self(v) for k, v in parts.items() if isinstance(v, Source)}
            same = all(v is parts[k] for k, v in moved.items())
            self.known[source] = source if same else replace(source, **moved)
        return self.known[source]


def _moving(traced: _Traced, sources: Sequence[Any]) -> _Moved:
    """Translates from a traced layer to the one whose arguments have ``sources``."""
    pairs = zip(traced.entry.arg_sources, sources, strict=True)
    return _Moved({a: b for a, b in pairs if a is not None and b is not None})


def _is_like(tx: Any, traced: _Traced, found: Any, layer: nn.Module) -> bool:
    """Whether the call ``found``, of ``layer``, would give the same graph as ``traced``."""
    if not invoke_subgraph.is_reusable(tx, traced.condition, found, traced.entry):
        return False
    if _sharing(found) != traced.sharing or _described(layer) != traced.described:
        return False
    moved = _moving(traced, found.arg_sources)
    scope = {"G": tx.output.root_tx.f_globals, "L": tx.output.root_tx.f_locals}
    known: dict[Any, Any] = {}

    def value(source: Any) -> Any:
        return moved(source).get_value(scope, {}, known)

    try:
        alike = all(asked.holds(value(asked.source)) for asked in traced.guards)
        return alike and all(value(one) is value(other) for one, other in traced.same)
    except (AttributeError, LookupError):  # this layer lacks an attribute or item
        return False


def _guard_as(tx: Any, traced: _Traced, sources: Sequence[Any]) -> None:
    """Install, for a layer that reuses a trace, the guards of the traced layer. torch itself only
    compares the two once, while tracing."""
    moved, ordered = _moving(traced, sources), tx.output.guard_on_key_order
    for asked in traced.guards:
        # Dictionaries whose key order is guarded, because keys are found by index.
        ordered.update({moved(base) for base in bases(asked.source) if base in ordered})
        # The guard of a tensor holds that tensor; this layer's tensors are guarded already.
        if asked.guard.create_fn_name() != "TENSOR_MATCH":
            install_guard(moved(asked.source).make_guard(asked.guard.create_fn))
    for one, other in traced.same:
        same = functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=moved(other))
        install_guard(moved(one).make_guard(same))


def _note_layer(tx: Any, layer: Any) -> str:
    """Note the layer's path on the call that was just added to the graph."""
    path = re.sub(r"\._modules\['([^']+)'\]", r".\1", layer.source.name)
    _last_call(tx).meta[LAYER] = path
    return path


def _last_call(tx: Any) -> Node:
    return next(n for n in reversed(tx.output.graph.nodes) if n.target is _invoke_subgraph)
