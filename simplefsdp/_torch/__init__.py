"""Every private part of PyTorch that this package touches, behind a name of our own.

Each function here has a contract test in ``tests/_torch/test_torch_contract.py``. When a new
release of PyTorch moves a private part, that test fails first, and says which part moved.
"""

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from simplefsdp._torch.backends import (
    Passes,
    Results,
    compile_with_aot_eager,
    compile_with_inductor,
    graphs_of,
    has_settings_for_whole_graphs,
    refuse_settings,
)
from simplefsdp._torch.backward_nodes import accumulates, backward_nodes, reached
from simplefsdp._torch.cache_files import cache_folder, keep, read_kept
from simplefsdp._torch.cpp import prepare_cpp
from simplefsdp._torch.cut import Cut, can_cut, copied, graph_module
from simplefsdp._torch.dtensor_ops import (
    default_dtensor_op,
    handle_dtensor_op,
    watch_writes_to_dtensors,
)
from simplefsdp._torch.dynamo import (
    CodePlace,
    GraphBreak,
    assigns_data,
    breaks_the_graph,
    code_number,
    compile_modules_of_torch_too,
    graph_break_of,
    guarded,
    has_policy,
    inlines,
    input_name,
    is_allowed_in_graph,
    is_checkpoint_region,
    is_compiled,
    is_skipped_by_dynamo,
    is_traced,
    left_alone_by_dynamo,
    line_of,
    module_path,
    name_backend,
    place_being_compiled,
    place_called,
    reset_with_dynamo,
    run_as_it_is,
    sets_grad_mode,
    trace_artifact,
    trace_without,
    traces_for,
    with_own_code,
)
from simplefsdp._torch.full_tensor import Other, Source, handle_full_tensor
from simplefsdp._torch.gloo import mend_gloo_gathers
from simplefsdp._torch.graph_key import UnknownGraphError, key_of_graph, meshes_of
from simplefsdp._torch.initialisers import filled_by_trunc_normal
from simplefsdp._torch.one_graph import AS_ONE, AsOne
from simplefsdp._torch.processes import (
    dispatch_mode,
    group_of_neighbours,
    high_priority,
    hold_up_stream,
    in_backward,
    is_checkpointed_by_hooks,
    no_torch_function,
    ranks_per_node,
    second_group,
    shared_store,
)
from simplefsdp._torch.recompiling import (
    forget_given_up,
    given_up_on,
    told_to_run_uncompiled,
    watch_recompiling,
)
from simplefsdp._torch.repeated_calls import REPEATED, inline_repeated_calls, reset_repeated_calls
from simplefsdp._torch.saved_code import (
    BackwardLaterError,
    backward_compiled_at_once,
    can_save_code,
    dump_code,
    expect_backward_later,
    load_code,
    may_be_compiled_later,
)
from simplefsdp._torch.tensors import (
    annotate_backward,
    cast_floating_point,
    draws_globally,
    fake_again,
    grad_dtype_override,
    grad_like,
    has_hooks,
    has_memory,
    has_no_data,
    hooks_of,
    is_of_memory,
    is_plain_tensor,
    is_same_view,
    is_split,
    is_to_empty,
    is_traced_tensor,
    layout_of,
    local_of,
    local_tensor,
    memory_of,
    order_of_saved,
    reduces_in_param_dtype,
    set_local_tensor,
    shard_storage_of,
    storage_number,
    storage_of,
    storage_use_count,
    version_of,
    watch_collectives_in_place,
    weak_memory_of,
)
from simplefsdp._torch.trace_once import trace_repeated_calls_once

name_backend("simplefsdp", "simplefsdp.compiler.backend")
compile_modules_of_torch_too("simplefsdp", "simplefsdp.compiler.backend.simplefsdp")
