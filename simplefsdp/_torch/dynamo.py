"""What Dynamo traces, where in the code it is, and how it handles errors of a backend."""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._dynamo import config, convert_frame, eval_frame
from torch._dynamo.backends import registry
from torch._dynamo.eval_frame import cached_backends
from torch._dynamo.exc import ShortenTraceback, exceptions_allowed_to_be_fallback
from torch._dynamo.guards import install_guard
from torch._dynamo.source import GlobalStateSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.trace_rules import is_callable_allowed
from torch._guards import CompileContext
from torch.fx import GraphModule, Node

# Code in these folders is not the user's.
_OURS = str(Path(__file__).parents[1]) + os.sep

_TORCHS = str(Path(torch.__file__).parent) + os.sep
_numbers = itertools.count(1)  # for the names of with_own_code()


def is_checkpoint_region(node: Node) -> bool:
    """Whether a Dynamo node calls a body that the user checkpoints (``torch.utils.checkpoint``)."""
    return node.target is torch.ops.higher_order.tag_activation_checkpoint


def has_policy(body: GraphModule) -> bool:
    """Whether the user chose what a checkpointed body saves (``context_fn``)."""
    return body.meta.get("_checkpoint_context_fn") is not None


def sets_grad_mode(node: Node) -> bool:
    """Whether a Dynamo node enters (``args == (False,)``) or leaves a ``no_grad`` block."""
    return node.target is torch._C._set_grad_enabled


def is_allowed_in_graph(function: Callable[..., Any]) -> bool:
    """Whether somebody gave a function, or a class, to ``torch.compiler.allow_in_graph``."""
    return bool(is_callable_allowed(function))


def trace_without(cls: type[torch.Tensor]) -> None:
    """Have Dynamo not trace operations on tensors of ``cls``."""
    torch._dynamo.config.nontraceable_tensor_subclasses.add(cls)


def run_as_it_is(function: Callable[..., Any]) -> None:
    """Keep Dynamo from starting a graph at ``function``, or at what it calls. (Where Dynamo cannot
    compile a frame, it tries each function that the frame calls.) If Dynamo does compile the frame
    that calls ``function``, it traces the call as usual."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def left_alone_by_dynamo(error: Exception, frame: FrameType) -> Exception:
    """``error`` as an exception that Dynamo passes on to the user when a backend raises it: same
    type, same words. The part of the traceback that the user sees begins at ``frame``."""
    alone: Exception = _left_alone(type(error))(str(error), first_useful_frame=frame)
    alone.__dict__.update(error.__dict__)
    return alone


def _left_alone(kind: type[Exception]) -> type[Any]:
    def __init__(self: Any, message: str, first_useful_frame: FrameType | None = None) -> None:
        Exception.__init__(self, message)
        self.first_useful_frame = first_useful_frame
        self._torch_dynamo_tracer_output = self.frame_exec_strategy = None
        self.message = message

    # __str__ leaves out the debugging advice that Dynamo adds to an exception's arguments.
    members = {
        "__init__": __init__,
        "__str__": lambda self: self.message,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__reduce__": lambda self: (kind, (self.message,)),
    }
    return type(kind.__name__, (ShortenTraceback, kind), members)


def is_skipped_by_dynamo(module: nn.Module) -> bool:
    """Whether the forward of ``module``, which runs eagerly now, should run compiled: a compiled
    call is on the stack, and the user has not asked for eager code (config or stance)."""
    if module._compiled_call_impl is None or config.disable:
        return False
    stance = eval_frame._stance.stance
    return stance in ("default", "eager_then_compile") and place_called() is not None


def with_own_code(function: Any, name: str) -> Any:
    """``function`` with a code object of its own, under a unique name, so that Dynamo does not mix
    it up with others. Dynamo counts compilations, and gives up after an exception, by code object.
    By file, line and name it remembers which sizes have differed between calls, and makes these
    symbolic at once in another function of that name."""
    function.__code__ = function.__code__.replace(co_name=f"{name} {next(_numbers)}")
    return function


def breaks_the_graph(error: BaseException) -> bool:
    """Whether Dynamo turns ``error``, which a backend raised, into a graph break. An example is
    AOTAutograd's error about an operator whose output shape depends on data.

    Dynamo would not do so if the graph has a function that was allowed in it, as we allow
    ``gather``. This call makes Dynamo do so for the graph that is being compiled.
    """
    if not isinstance(error, exceptions_allowed_to_be_fallback):
        return False
    InstructionTranslator.current_tx().output.has_user_defined_allowed_in_graph = False
    return True


@dataclass(frozen=True)
class GraphBreak:
    """Why Dynamo ended a graph early, and where: the stack, outermost frame first."""

    reason: str
    stack: tuple[traceback.FrameSummary, ...]


def graph_break_of(gm: GraphModule) -> GraphBreak | None:
    """The graph break that ended this Dynamo graph, or None if it ran to the return."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return GraphBreak(reason.reason, tuple(reason.user_stack))


def assigns_data(cut: GraphBreak) -> bool:
    """Whether a graph broke at ``tensor.data = ...``, for a tensor that was made in the graph."""
    return cut.reason.startswith("Failed to mutate tensor data attribute")


def traces_for(backend: str) -> bool:
    """Whether Dynamo traces now, for the backend of that name or for one that wraps it."""
    tracer = _tracer()
    return tracer is not None and is_backend(tracer.output.compiler_fn, backend)


def is_backend(function: Any, name: str) -> bool:
    """Whether ``function`` is the backend of that name, or wraps it."""
    return any(getattr(one, "__name__", None) == name for one in backends_in(function))


def backends_in(backend: Any, depth: int = 5) -> Iterator[Any]:
    """A backend, and what torch and others have wrapped in it, so many times."""
    yield backend
    if not depth:  # of a mock, each attribute is another mock
        return
    for name in ("compiler_fn", "_torchdynamo_orig_backend", "func", "__wrapped__"):
        if inner := getattr(backend, name, None):
            yield from backends_in(inner, depth - 1)


def inlines(prefix: str) -> bool:
    """Whether Dynamo now traces inside a call of a function whose name begins with ``prefix``."""
    tracer = _tracer()
    tracer = tracer and tracer.output.current_tx
    while tracer is not None:
        if tracer.f_code.co_name.startswith(prefix):
            return True
        tracer = getattr(tracer, "parent", None)
    return False


def guarded(question: Callable[[], bool]) -> bool:
    """The answer to ``question``. If Dynamo traces now, a guard asks it again before the compiled
    code runs: another answer recompiles."""
    answer = question()
    if _tracer() is None:  # after a trace, Dynamo itself reads attributes that call this
        return answer

    def create(builder: Any, _: Any) -> None:
        text = f"{question.__name__}() is {answer}"
        root = builder.guard_manager.root
        root.add_lambda_guard(lambda _: question() is answer, [text], None)

    install_guard(GlobalStateSource().make_guard(create))
    return answer


def _tracer() -> Any:
    """The translator with which Dynamo traces now; None if it traces nothing."""
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:
        return None


class CodePlace(NamedTuple):
    """Identifies a function, also if Dynamo has replaced its code object."""

    file: str
    line: int
    name: str


def _place_of(code: CodeType) -> CodePlace:
    return CodePlace(code.co_filename, code.co_firstlineno, code.co_name)


def place_being_compiled() -> CodePlace | None:
    """The function that Dynamo compiles now; None if it compiles none."""
    tracer = _tracer()
    return None if tracer is None else _place_of(tracer.f_code)


def place_called() -> CodePlace | None:
    """The function that the outermost ``torch.compile`` call on the stack runs; None if there is no
    such call, or if the function is still being compiled."""
    found: CodePlace | None = None
    inner: CodePlace | None = None  # the last function on the way out that is not torch's own
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        place = _place_of(frame.f_code)
        if place.file == convert_frame.__file__:
            inner = None  # a function that the compiler has called
        elif place.file == eval_frame.__file__ and place.name == "compile_wrapper":
            found = inner
        elif not place.file.startswith(_TORCHS):
            inner = place
        frame = frame.f_back
    return found


def code_number() -> int | None:
    """Dynamo's number of the code object that it compiles now, the same for all graphs of that
    code; None if it compiles none."""
    found = CompileContext.current_compile_id()
    return None if found is None else found.frame_id


def input_name(placeholder: Node) -> str | None:
    """FQN of a graph input that is a parameter, else its Python expression, or None."""
    source = getattr(placeholder, "_dynamo_source", None)
    if source is None:
        return None
    name = source.name
    # L['self']._modules['fc']._parameters['weight'] is fc.weight to the user.
    return ".".join(re.findall(r"\._(?:modules|parameters)\['([^']+)'\]", name)) or name


def module_path(node: Node) -> str | None:
    """FQN-like path and class of the innermost module that made ``node``, or None."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    path, cls = list(stack.values())[-1]
    path = re.sub(r"^L\['\w+'\]\.?(__self__\.?)?", "", path) or "the model"
    return f"{path} ({getattr(cls, '__name__', cls)})"


def line_of(node: Node | None) -> str:
    """Where the user's code made ``node``: the innermost frame of its trace, if it has one."""
    trace = node.stack_trace if node is not None else None
    lines = [line.strip() for line in (trace or "").splitlines()]
    others = (f'File "{_OURS}', f'File "{_TORCHS}')
    frames = [i for i, x in enumerate(lines) if x.startswith("File ") and not x.startswith(others)]
    return f" ({': '.join(lines[frames[-1] : frames[-1] + 2])})" if frames else ""


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text to what ``TORCH_TRACE`` collects, which tlparse shows. ``text`` is only called if
    a trace is collected."""
    torch._logging._internal.trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text
    )


def is_traced() -> bool:
    """Whether ``TORCH_TRACE`` collects a trace of what is compiled."""
    internal = torch._logging._internal
    own = [h for h in internal.trace_log.handlers if isinstance(h, internal.LazyTraceHandler)]
    return any(handler.root_dir or handler.stream for handler in own)


def reset_with_dynamo(backend: Callable[..., Any]) -> None:
    """Have ``torch.compiler.reset()`` call ``backend.reset()``, if there is one. By itself Dynamo
    does so only for backends of ``torch.compile`` calls since the last reset, and forgets those of
    earlier calls, whose functions may have been recompiled since."""
    cached_backends.setdefault(id(backend), backend)


def compile_modules_of_torch_too(backend: str, function: str = "") -> None:
    """Have ``module.compile(backend=backend)`` compile a module of torch's own as one graph.

    Dynamo starts no graph at a function of torch's own, so ``nn.Sequential(...).compile()`` would
    run eagerly, and the backend would never be called. ``torch.compile(module)`` calls the module
    from a wrapper, at which Dynamo starts. This adds such a wrapper, but only for ``backend``. The
    user may pass it by name, or as the function whose full name is ``function``. Since 2.14 torch
    does so itself.
    """
    if torch.__version__ >= "2.14":
        return
    original = nn.Module.compile

    def is_meant(given: Any) -> bool:
        names = (getattr(given, part, "") for part in ("__module__", "__qualname__"))
        return given == backend or ".".join(map(str, names)) == function

    def in_front(module: nn.Module) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return module._call_impl(*args, **kwargs)

        return call

    @functools.wraps(original)
    def compile_module(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if is_meant(kwargs.get("backend")) and _is_torchs_own(self):
            self._compiled_call_impl = torch.compile(in_front(self), *args, **kwargs)

    nn.Module.compile = compile_module  # type: ignore[assignment,method-assign]


def name_backend(name: str, module: str) -> None:
    """Make a backend known to ``torch.compile`` by name, also if its package is not installed but
    only on the path. Its module is imported at the first use."""
    place = EntryPoint(name, f"{module}:{name}", "torch_dynamo_backends")
    registry._BACKENDS.setdefault(name, place)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None


def _is_torchs_own(module: nn.Module) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and code.co_filename.startswith(_TORCHS)
