"""Plans on disk, beside Inductor's caches: what was planned before is not planned again.

A plan is the same whenever it is made of the same program, costs and budget by the same code, so
these are its key. One rank plans for all, and only that one reads or writes here: ranks that find
different files cannot come to different plans.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from inductor_passes.ir.json_file import MIB, parse_json
from inductor_passes.ir.program import Bucket
from inductor_passes.planner.plan import Plan
from simplefsdp import _torch
from simplefsdp.compiler.cache_key import sources

FOLDER = "simplefsdp_plans"
_MOST_NBYTES = 64 * MIB

log = logging.getLogger("simplefsdp")


def recalled(made_of: str, make: Callable[[], Plan]) -> Plan:
    """The plan that is made of ``made_of``: as an earlier process made it, or made now and kept.

    Args:
        made_of: program, costs, budget: all that the plan depends on beside the planner's sources.
        make: makes it. What it raises is not kept.
    """
    name = f"{hashlib.sha256(f'{sources()}{made_of}'.encode()).hexdigest()}.json"
    content = _torch.read_kept(FOLDER, name)
    try:
        if content is not None and len(content) <= _MOST_NBYTES:
            return _plan_of(parse_json(content))
    except (ValueError, TypeError, KeyError) as error:
        log.debug("the plan in %s cannot be read, and is made anew: %s", name, error)
    plan = make()
    try:
        _torch.keep(FOLDER, name, json.dumps(asdict(plan)).encode())
    except OSError as error:  # it would only have saved time
        log.debug("the plan cannot be kept in %s: %s", name, error)
    return plan


def _plan_of(told: Any) -> Plan:
    buckets = (Bucket(b["label"], tuple(b["starts"]), b["window"]) for b in told["buckets"])
    return Plan(**{**told, "buckets": tuple(buckets)})
