"""Settings of PaddlePaddle's fleet that jfleet lacks, and what to use instead."""

from jfleet._errors import ConfigError


class UnknownSettingError(ConfigError, AttributeError):
    """A setting that does not exist, or exists in fleet only."""


_XLA = "XLA decides this; pass compiler options to jax.jit if you must"
_SERVER = "jfleet has no parameter server; shard big tables with strategy.sharding"
_FUSE = "XLA fuses and buckets collectives itself; drop this line"

ELSEWHERE = {
    "a_sync": f"{_SERVER}, or train asynchronously with strategy.localsgd",
    "a_sync_configs": _SERVER,
    "adam_d2sum": _SERVER,
    "asp": "prune with an optax mask of your own (optax.masked)",
    "auto_search": "use strategy.auto = True with auto_configs={'mode': 'fill'}",
    "build_strategy": _XLA,
    "conv_workspace_size_limit": _XLA,
    "cudnn_batchnorm_spatial_persistent": _XLA,
    "cudnn_exhaustive_search": _XLA,
    "elastic": "save and load: jfleet.load_group_sharded_model takes any mesh",
    "execution_strategy": _XLA,
    "find_unused_parameters": "nothing to find: JAX gives unused parameters zeros",
    "fleet_desc_configs": _SERVER,
    "fp16_compress": "fleet renamed it: use strategy.fp16_allreduce",
    "fs_client_param": _SERVER,
    "fuse_all_reduce_ops": _FUSE,
    "fuse_grad_merge": _FUSE,
    "fuse_grad_size_in_MB": _FUSE,
    "fuse_grad_size_in_num": _FUSE,
    "_fuse_grad_size_in_TFLOPS": _FUSE,
    "_calc_comm_same_stream": _XLA,
    "heter_ccl_mode": "use one mesh for each kind of device",
    "hierarchical_allreduce_inter_nranks": _XLA,
    "is_fl_ps_mode": _SERVER,
    "is_with_coordinator": _SERVER,
    "last_comm_group_size_MB": _FUSE,
    "load_from_prototxt": "use DistributedStrategy.from_json(text)",
    "mode": "jfleet trains collectively only; drop this line",
    "nccl_comm_num": _XLA,
    "pipeline": "jfleet has no pipeline yet; use sharding level 'p_g_os' to fit a "
    "big model, or gradient_merge for micro batches",
    "pipeline_configs": "jfleet has no pipeline yet; micro batches are "
    "gradient_merge_configs={'k_steps': ..}",
    "qat": "quantise the model itself, for instance with the aqt package",
    "qat_configs": "quantise the model itself, for instance with the aqt package",
    "save_to_prototxt": "use strategy.to_json()",
    "semi_auto": "use strategy.auto = True with auto_configs={'mode': 'fill'}",
    "sparse_table_configs": _SERVER,
    "split_data": "use jfleet.shard_batch",
    "sync_nccl_allreduce": _XLA,
    "trainer_desc_configs": _SERVER,
    "use_hierarchical_allreduce": _XLA,
    "without_graph_optimization": _XLA,
}
"""Attributes of fleet's strategy."""

_CAST = "jfleet casts by parameter path: use keep_fp32=[regular expressions]"
_RECOMPUTE = "jfleet recomputes by policy, not by tensor name: use policy"
_SEGMENT = "XLA schedules the gathers; drop this key"

KEYS_ELSEWHERE = {
    "amp_configs": {
        "custom_white_list": _CAST,
        "custom_black_list": _CAST,
        "custom_black_varnames": _CAST,
        "use_pure_fp16": "use dtype='float16'",
        "use_pure_bf16": "use dtype='bfloat16'",
        "use_fp16_guard": _CAST,
        "use_optimizer_fp16": "optimizer state is always float32; drop this key",
    },
    "recompute_configs": {
        "checkpoints": f"{_RECOMPUTE}, or jfleet.optax_meta.recompute_block on a part "
        "of the model",
        "enable_offload": "use policy='offload_dots'",
        "checkpoint_shape": "shapes are known when the step is traced; drop this key",
        "enable_tuning": "use strategy.recompute = 'auto'",
        "refined_ops_patterns": _RECOMPUTE,
    },
    "localsgd_configs": {
        "init_k_steps": "this key belongs to adaptive_localsgd_configs",
        "max_k_steps": "this key belongs to adaptive_localsgd_configs",
    },
    "adaptive_localsgd_configs": {"k_steps": "use init_k_steps"},
    "sharding_configs": {
        "segment_broadcast_MB": _SEGMENT,
        "fuse_broadcast_MB": _SEGMENT,
        "segment_anchors": _SEGMENT,
        "segment_strategy": _SEGMENT,
        "sharding_segment_strategy": _SEGMENT,
        "sharding_group_size": "use degree",
        "mp_degree": "use hybrid_configs={'mp_degree': ..} and tensor_parallel",
        "dp_degree": "use hybrid_configs={'dp_degree': ..}",
        "pp_degree": "jfleet has no pipeline yet; drop this key",
        "hybrid_dp": "use a mesh {'replica': .., 'shard': ..}",
        "gradient_merge_acc_step": "use strategy.gradient_merge and its k_steps",
        "optimize_offload": "use offload",
        "optimize_cast": "a cast goes before the gather by itself; drop this key",
        "pp_allreduce_in_optimize": "jfleet has no pipeline yet; drop this key",
        "_dp_as_optimizer_sharding": "use level='os' over the data axis",
        "enable_tuning": "use strategy.sharding = 'auto'",
        "use_calc_stream": _SEGMENT,
        "segment_size": "use min_shard_size",
        "buffer_max_size": _SEGMENT,
        "comm_overlap": _SEGMENT,
        "tensor_fusion": _SEGMENT,
    },
    "tensor_parallel_configs": {
        "tensor_init_seed": "pass a random key to the init function of the model",
    },
    "hybrid_configs": {
        "mp_configs": "XLA schedules tensor parallelism; drop this key",
        "pp_configs": "jfleet has no pipeline yet; drop this key",
        "sharding_configs": "use strategy.sharding_configs",
        "enable_optimizer_timer": "use jax.profiler",
    },
    "gradient_scale_configs": {
        "scale_gradient": "scaling before or after the merge is the same; drop it",
    },
    "gradient_merge_configs": {"accumulate_steps": "use k_steps"},
    "clip_configs": {"clip_norm": "use max_norm"},
}
"""Keys of fleet's ``*_configs``, by block."""
