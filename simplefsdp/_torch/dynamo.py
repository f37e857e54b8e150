"""What Dynamo traces, where it is, and what it does with errors."""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
import traceback
from collections.abc import Callable
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

# Where code is not the user's.
_OURS = str(Path(__file__).parents[1]) + os.sep

_TORCHS = str(Path(torch.__file__).parent) + os.sep
_numbers = itertools.count(1)  # of codes


def is_checkpoint_region(node: Node) -> bool:
    """Whether a Dynamo node calls a body that the user checkpoints (``torch.utils.checkpoint``)."""
    return node.target is torch.ops.higher_order.tag_activation_checkpoint


def has_policy(body: GraphModule) -> bool:
    """Whether the user says of a checkpointed body what to keep (``context_fn``)."""
    return body.meta.get("_checkpoint_context_fn") is not None


def sets_grad_mode(node: Node) -> bool:
    """Whether a Dynamo node enters (``args == (False,)``) or leaves a ``no_grad`` block."""
    return node.target is torch._C._set_grad_enabled


def is_allowed_in_graph(function: Callable[..., Any]) -> bool:
    """Whether somebody gave a function, or a class, to ``torch.compiler.allow_in_graph``."""
    return bool(is_callable_allowed(function))


def trace_without(cls: type[torch.Tensor]) -> None:
    """Let Dynamo leave alone what is done to tensors of ``cls``."""
    torch._dynamo.config.nontraceable_tensor_subclasses.add(cls)


def run_as_it_is(function: Callable[..., Any]) -> None:
    """Let no call of ``function`` become a graph of its own, nor what it calls: where Dynamo cannot
    take a frame, it goes on with each function that the frame calls. Called from a frame that it
    can take, ``function`` is traced as ever."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def left_alone_by_dynamo(error: Exception, frame: FrameType) -> Exception:
    """``error`` as an exception that a backend can raise and its user gets: same type, same words;
    the part of its traceback that the user is to see begins at ``frame``."""
    alone: Exception = _left_alone(type(error))(str(error), first_useful_frame=frame)
    alone.__dict__.update(error.__dict__)
    return alone


def _left_alone(kind: type[Exception]) -> type[Any]:
    def __init__(self: Any, message: str, first_useful_frame: FrameType | None = None) -> None:
        Exception.__init__(self, message)
        self.first_useful_frame = first_useful_frame
        self._torch_dynamo_tracer_output = self.frame_exec_strategy = None
        self.message = message

    # Dynamo adds advice to the arguments, for those who debug it.
    members = {
        "__init__": __init__,
        "__str__": lambda self: self.message,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__reduce__": lambda self: (kind, (self.message,)),
    }
    return type(kind.__name__, (ShortenTraceback, kind), members)


def is_skipped_by_dynamo(module: nn.Module) -> bool:
    """Whether ``module``, whose forward runs eagerly now, was called compiled: the caller stands on
    the stack, and nobody has asked for eager code."""
    if module._compiled_call_impl is None or config.disable:
        return False
    stance = eval_frame._stance.stance
    return stance in ("default", "eager_then_compile") and place_called() is not None


def with_own_code(function: Any, name: str) -> Any:
    """``function`` with code of its own, under a name that no other has. By code Dynamo counts what
    it compiles, and gives up on one after an exception. By file, line and name it remembers which
    sizes have differed between calls, and leaves them open in the first call of another function.
    """
    function.__code__ = function.__code__.replace(co_name=f"{name} {next(_numbers)}")
    return function


def breaks_the_graph(error: BaseException) -> bool:
    """Whether Dynamo makes a graph break of ``error``, raised by a backend: an operator whose
    output depends on data, say, that AOTAutograd meets.

    It does not where the user allowed a function in the graph, as we allow ``gather``; from here
    on, for the graph that is being compiled, it does.
    """
    if not isinstance(error, exceptions_allowed_to_be_fallback):
        return False
    InstructionTranslator.current_tx().output.has_user_defined_allowed_in_graph = False
    return True


@dataclass(frozen=True)
class GraphBreak:
    """Why Dynamo ended a graph early, and where: frames outermost first."""

    reason: str
    stack: tuple[traceback.FrameSummary, ...]


def graph_break_of(gm: GraphModule) -> GraphBreak | None:
    """The graph break that ended this Dynamo graph, or None if it ran to the return."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return GraphBreak(reason.reason, tuple(reason.user_stack))


def assigns_data(cut: GraphBreak) -> bool:
    """Whether a graph broke at ``tensor.data = ...`` of a tensor that was made in it."""
    return cut.reason.startswith("Failed to mutate tensor data attribute")


def backend_traced_for() -> str | None:
    """The name of the backend that Dynamo traces a graph for now; None if it traces none."""
    tracer = _tracer()
    return None if tracer is None else str(getattr(tracer.output.compiler_fn, "__name__", ""))


def inlines(prefix: str) -> bool:
    """Whether Dynamo traces now inside a call of a function whose name begins so."""
    tracer = _tracer()
    tracer = tracer and tracer.output.current_tx
    while tracer is not None:
        if tracer.f_code.co_name.startswith(prefix):
            return True
        tracer = getattr(tracer, "parent", None)
    return False


def guarded(question: Callable[[], bool]) -> bool:
    """The answer to a question; what Dynamo traces now runs only where it is the same."""
    answer = question()
    if _tracer() is None:  # Dynamo itself looks at an attribute, after it has traced
        return answer

    def create(builder: Any, _: Any) -> None:
        text = f"{question.__name__}() is {answer}"
        root = builder.guard_manager.root
        root.add_lambda_guard(lambda _: question() is answer, [text], None)

    install_guard(GlobalStateSource().make_guard(create))
    return answer


def _tracer() -> Any:
    """What Dynamo traces with now; None if it traces nothing."""
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:
        return None


class CodePlace(NamedTuple):
    """What a function is known by, whatever Dynamo made of its code."""

    file: str
    line: int
    name: str


def _place_of(code: CodeType) -> CodePlace:
    return CodePlace(code.co_filename, code.co_firstlineno, code.co_name)


def place_being_compiled() -> CodePlace | None:
    """The function whose graph Dynamo hands to a backend now; None if it does not."""
    tracer = _tracer()
    return None if tracer is None else _place_of(tracer.f_code)


def place_called() -> CodePlace | None:
    """The outermost of the functions that run compiled, which the user's call began with; None if
    none does: it is being compiled."""
    found: CodePlace | None = None
    inner: CodePlace | None = None  # the last function on the way out that is not torch's own
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        place = _place_of(frame.f_code)
        if place.file == convert_frame.__file__:
            inner = None  # what the compiler has called
        elif place.file == eval_frame.__file__ and place.name == "compile_wrapper":
            found = inner
        elif not place.file.startswith(_TORCHS):
            inner = place
        frame = frame.f_back
    return found


def code_number() -> int | None:
    """Dynamo's number of the code that it compiles, one for all graphs that it makes of that; None
    if it compiles none."""
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
    """Add a text to what ``TORCH_TRACE`` collects (tlparse shows it); nothing is made without."""
    torch._logging._internal.trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text
    )


def is_traced() -> bool:
    """Whether ``TORCH_TRACE`` collects what is compiled."""
    internal = torch._logging._internal
    own = [h for h in internal.trace_log.handlers if isinstance(h, internal.LazyTraceHandler)]
    return any(handler.root_dir or handler.stream for handler in own)


def reset_with_dynamo(backend: Callable[..., Any]) -> None:
    """Let ``torch.compiler.reset()`` call ``backend.reset()``, if it has one; Dynamo does so only
    for what ``torch.compile`` was called for since the last one, not for what was compiled again.
    """
    cached_backends.setdefault(id(backend), backend)


def compile_modules_of_torch_too(backend: str, function: str = "") -> None:
    """Have ``module.compile(backend=backend)`` compile a module of torch's own as one graph.

    Dynamo starts at no function of torch's, so ``nn.Sequential(...).compile()`` runs as it is, and
    the backend never hears of it. ``torch.compile(module)`` puts a function in front, where Dynamo
    starts; so does this, for ``backend`` only, which may be given by the full name of its
    ``function``, too. Since 2.14 torch does so itself.
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
    """Have ``torch.compile`` know a backend by name where its package is only on the path, and not
    installed; its module is imported when it is asked for."""
    place = EntryPoint(name, f"{module}:{name}", "torch_dynamo_backends")
    registry._BACKENDS.setdefault(name, place)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None


def _is_torchs_own(module: nn.Module) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and code.co_filename.startswith(_TORCHS)
