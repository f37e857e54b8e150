"""Compiled code on disk, so that a later process need not trace, plan and lower again.

A file has the code of a Dynamo graph's forward and backward, and what the ranks agreed on for both
(``observed.py``). Its key contains all that the code depends on; in doubt there is no key, and the
graph is traced. On several ranks all use their files, or none does: a rank that compiles calls the
compiler of its backward in the middle of a step, and would meet nobody there if the others compile
nothing. So the ranks first compare whether each has a file, and whether the same was agreed on in
all files. Then they agree on all that they would have agreed on in compiling: a rank that later
compiles alone finds the usual decisions.
"""

from __future__ import annotations

import logging
import pickle
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from inductor_passes.adapters._torch import ranks_of_group
from simplefsdp import _torch, rank_guard
from simplefsdp.compiler import breaks, observers
from simplefsdp.compiler.dedupe import specs_of
from simplefsdp.compiler.observed import Observed, agree_again
from simplefsdp.compiler.plans import Compilation, decision_before
from simplefsdp.frontend.gather import gather
from simplefsdp.frontend.gather_spec import GatherSpec
from simplefsdp.rank_logging import level

FOLDER = "simplefsdp_code"
Code = Callable[..., Any]
Loaded = tuple[dict[bool, Observed], Code]  # what was agreed on of the graphs, and their code

log = logging.getLogger("simplefsdp")


class WarmStart:
    """The file of one Dynamo graph.

    Attributes:
        shared: names the file that does not exist yet and that all ranks could use; "" if there is
            no such file, or if ranks would use several. Known after :meth:`code`.
    """

    def __init__(
        self, gm: GraphModule, example_inputs: Sequence[Any], compilation: Compilation
    ) -> None:
        self._compilation = compilation
        self.begin()
        self.shared = ""
        self._can = compilation.options.executor != "aot_eager" and _torch.can_save_code()
        self._name: str | None = None
        if self._can and _torch.cache_folder(FOLDER) is not None:
            try:
                self._meshes = _torch.meshes_of(example_inputs)
                self._name = _name(gm, example_inputs, compilation)
            except Exception as error:
                log.debug("compiled code is not kept: %s", error)

    def code(self, *, together: bool) -> Code | None:
        """The code of this rank's file, if all ranks have one; else None. Also None unless
        ``together``: a rank that compiles alone, since the graph was agreed on before, uses no
        file."""
        if not self._can or not together:
            return None
        ranks, timeout_s = self._compilation.ranks, self._compilation.timeout_s
        found = self.loaded()
        if found is None:
            place = self._place()
            offered = f"none, {place}"
        else:  # the part of it that is the same on all ranks
            offered = repr([(p, o.planned, o.launches) for p, o in sorted(found[0].items())])
        what = "whether the code of an earlier run is used"
        alike = rank_guard.have_the_same(what, offered, ranks, timeout_s)
        if found is None:
            self.shared = place if alike and len(ranks) > 1 else ""
            return None
        if not alike:
            return None
        code = self.use(found)
        log.debug("the code of an earlier run is used")
        return code

    def use(self, found: Loaded, *, is_said: bool = False) -> Code:
        """The code in ``found``, which all ranks have, once they have agreed again on its graphs.
        The log lines are not repeated if that ``is_said`` already."""
        observed, code = found
        for is_backward, one in observed.items():
            said = "" if is_said else one.said
            agree_again(one._replace(said=said), is_backward, self._compilation)
        return code

    def _place(self) -> str:
        """Where the file is, as a text: equal on ranks that need the same code and find each
        other's files; "" on a rank that can use none."""
        folder = _torch.cache_folder(FOLDER)
        if not self._is_wanted or folder is None or (folder / self._alone).exists():
            return ""
        return f"{platform.node()} {folder.absolute()} {self._name}"

    @property
    def _alone(self) -> str:
        return f"{self._name}.alone"

    def share_no_more(self) -> None:
        """Note on disk that this code cannot be kept: no later process is to try to share it."""
        _torch.keep(FOLDER, self._alone, b"")

    @property
    def _is_wanted(self) -> bool:
        return not (self._name is None or observers.any_listen() or _torch.is_traced())

    def loaded(self) -> Loaded | None:
        """What was agreed on for the graphs in the file, and their code; None if there is no file,
        or none that can be used."""
        if not self._is_wanted:
            return None
        content = _torch.read_kept(FOLDER, str(self._name))
        if content is None:
            return None
        try:
            observed, code = pickle.loads(content)
            if not all(self._is_fine(one) for one in observed.values()):
                return None
            return observed, _torch.load_code(code, self._meshes)
        except Exception as error:  # compiling meets it too, or does not need what failed
            log.debug("compiled code in %s cannot be used: %r", self._name, error)
            return None

    def _is_fine(self, observed: Observed) -> bool:
        """Whether it has the plan that holds in this process, and the log line if one is wanted."""
        if log.isEnabledFor(level()) and not observed.said:
            return False
        if observed.asked is None:
            return True
        known = decision_before(observed.asked, self._compilation.ranks)
        return known is None or known.planned == observed.planned

    @property
    def can_keep(self) -> bool:
        """Whether what is compiled can be kept."""
        return self._name is not None

    def begin(self) -> None:
        """Forget what was added before: that attempt to compile has been given up."""
        self._observed: dict[bool, Observed] = {}
        self._codes: dict[bool, Any] = {}
        self._entry: Any = None
        self._is_accepted = False

    def add(self, is_backward: bool, observed: Observed, code: Any) -> None:
        """Called with each graph that is compiled."""
        self._observed[is_backward], self._codes[is_backward] = observed, code

    def finish(self, entry: Any) -> None:
        """Called by AOTAutograd when it has compiled all, perhaps when the first backward runs."""
        self._entry = entry
        if self._is_accepted:
            self._keep()

    def accept(self) -> None:
        """Keep the code on disk, since it is what runs: now, or when its backward is compiled."""
        self._is_accepted = True
        if self._entry is not None:
            try:
                self._keep()
            except Exception as error:  # it would only have saved time
                log.debug("compiled code is not kept: %r", error)

    def _keep(self) -> None:
        if all(one.stands for one in self._observed.values()):
            code = _torch.dump_code(self._entry, self._codes, self._meshes)
            kept = {part: one._replace(number=0) for part, one in self._observed.items()}
            _torch.keep(FOLDER, str(self._name), pickle.dumps((kept, code)))
        self._entry, self._codes = None, {}


def _name(gm: GraphModule, example_inputs: Sequence[Any], compilation: Compilation) -> str:
    options = compilation.options
    if options.cudagraphs:
        raise _torch.UnknownGraphError("cudagraphs")
    if breaks.is_between_breaks():  # the warning of a break comes with compiling
        raise _torch.UnknownGraphError("the graph breaks")
    specs = specs_of(gm)
    if any(spec.tensor_class for spec in specs):
        raise _torch.UnknownGraphError("methods of a class that is not ours are traced")
    more = [
        compilation.identity,
        repr(options.executor),
        repr((compilation.ranks, compilation.grad)),
        *_groups(specs),
    ]
    return _torch.key_of_graph(gm, example_inputs, more, gather)


def _groups(specs: Iterable[GatherSpec]) -> list[str]:
    """The ranks behind each name of a group."""
    names: Mapping[str, None] = dict.fromkeys(
        name
        for spec in specs
        for name in (
            spec.shard_group,
            spec.reduce_group,
            spec.post_forward_group,
            *(name for name, _ in spec.copy_groups),
        )
        if name
    )
    ranks = {name: ranks_of_group(name) for name in names}
    if None in ranks.values():
        raise _torch.UnknownGraphError("a group that this process does not have")
    return [f"{name} {found}" for name, found in ranks.items()]
