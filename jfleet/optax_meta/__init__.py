"""One optax transformation per distributed strategy; each works alone.

Each takes plain keyword arguments. Those that communicate take ``axis_name``, the axis
of ``jax.shard_map`` or ``jax.vmap`` on which their peers are; without it they run on
one device.
"""

from jfleet.optax_meta._averaging import sync_model_state as sync_model_state
from jfleet.optax_meta._dgc_plan import dgc_compressed_paths as dgc_compressed_paths
from jfleet.optax_meta._loss import cast_loss as cast_loss
from jfleet.optax_meta._loss import cast_params as cast_params
from jfleet.optax_meta._loss import scale_loss as scale_loss
from jfleet.optax_meta._loss import scaled_value_and_grad as scaled_value_and_grad
from jfleet.optax_meta.adaptive_localsgd import (
    AdaptiveLocalsgdState as AdaptiveLocalsgdState,
)
from jfleet.optax_meta.adaptive_localsgd import adaptive_localsgd as adaptive_localsgd
from jfleet.optax_meta.amp import LossScaleState as LossScaleState
from jfleet.optax_meta.amp import MasterWeightsState as MasterWeightsState
from jfleet.optax_meta.amp import dynamic_loss_scaling as dynamic_loss_scaling
from jfleet.optax_meta.amp import loss_scale as loss_scale
from jfleet.optax_meta.amp import master_weights as master_weights
from jfleet.optax_meta.clip import ClipState as ClipState
from jfleet.optax_meta.clip import clip_by_global_norm as clip_by_global_norm
from jfleet.optax_meta.clip import global_norm as global_norm
from jfleet.optax_meta.dgc import DgcState as DgcState
from jfleet.optax_meta.dgc import dgc as dgc
from jfleet.optax_meta.fp16_allreduce import Fp16AllreduceState as Fp16AllreduceState
from jfleet.optax_meta.fp16_allreduce import fp16_allreduce as fp16_allreduce
from jfleet.optax_meta.fp16_allreduce import replica_mean as replica_mean
from jfleet.optax_meta.gradient_merge import GradientMergeState as GradientMergeState
from jfleet.optax_meta.gradient_merge import gradient_merge as gradient_merge
from jfleet.optax_meta.lamb import LambState as LambState
from jfleet.optax_meta.lamb import lamb as lamb
from jfleet.optax_meta.lars import LarsState as LarsState
from jfleet.optax_meta.lars import lars as lars
from jfleet.optax_meta.localsgd import LocalsgdState as LocalsgdState
from jfleet.optax_meta.localsgd import localsgd as localsgd
from jfleet.optax_meta.recompute import recompute as recompute
from jfleet.optax_meta.recompute import recompute_block as recompute_block
from jfleet.optax_meta.sharding import ShardedTransformation as ShardedTransformation
from jfleet.optax_meta.sharding import sharding as sharding
from jfleet.optax_meta.sync_batch_norm import BatchStatistics as BatchStatistics
from jfleet.optax_meta.sync_batch_norm import batch_statistics as batch_statistics
from jfleet.optax_meta.sync_batch_norm import sync_batch_norm as sync_batch_norm
