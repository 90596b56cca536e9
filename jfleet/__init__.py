"""jfleet: distributed strategies for JAX that are easy to configure.

Group sharding lays a training state out as ZeRO 1, 2 or 3; meta optimizers change what
is computed. See the README for the three-minute version.
"""

import importlib
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _version

from jfleet._errors import CheckpointError as CheckpointError
from jfleet._errors import ConfigError as ConfigError
from jfleet._errors import ConfigTypeError as ConfigTypeError
from jfleet._errors import DistributedError as DistributedError
from jfleet._errors import DonatedBufferError as DonatedBufferError
from jfleet._errors import JfleetError as JfleetError
from jfleet._errors import JfleetWarning as JfleetWarning
from jfleet._errors import PlacementError as PlacementError
from jfleet._gather import early_gathers as early_gathers
from jfleet._gather import gather_at_use as gather_at_use
from jfleet.distributed import DistributedOptimizer as DistributedOptimizer
from jfleet.distributed import distributed_optimizer as distributed_optimizer
from jfleet.group_sharded import create_sharded as create_sharded
from jfleet.group_sharded import group_sharded_parallel as group_sharded_parallel
from jfleet.mesh import init as init
from jfleet.mesh import new_group as new_group
from jfleet.mesh import shard_batch as shard_batch
from jfleet.optimizer import optimizer as optimizer
from jfleet.plan import Plan as Plan
from jfleet.plan import plan as plan
from jfleet.processes import process_mean as process_mean
from jfleet.processes import to_host as to_host
from jfleet.resolver import Registry as Registry
from jfleet.resolver import Resolution as Resolution
from jfleet.resolver import Rule as Rule
from jfleet.resolver import build as build
from jfleet.resolver import default_registry as default_registry
from jfleet.resolver import resolve as resolve
from jfleet.strategy import DistributedStrategy as DistributedStrategy
from jfleet.train_step import Metrics as Metrics
from jfleet.train_step import TrainState as TrainState

try:
    __version__ = _version("jfleet")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"

# Importing Orbax takes longer than importing the rest; it waits for the first use, and
# so does what a training script rarely needs.
_LAZY = {
    "AutoPlan": "jfleet._tuning.auto",
    "Checkpointer": "jfleet.checkpointer",
    "HARDWARE": "jfleet._planning.hardware",
    "Hardware": "jfleet._planning.hardware",
    "SaveHandle": "jfleet.save",
    "StepPlan": "jfleet._planning.step_plan",
    "auto_plan": "jfleet._tuning.auto",
    "compile_step": "jfleet._tuning.target",
    "explain": "jfleet._planning.explain",
    "export_safetensors": "jfleet.export",
    "import_safetensors": "jfleet.export",
    "load_group_sharded_model": "jfleet.save",
    "mesh_over": "jfleet._tuning.target",
    "plan_program": "jfleet._planning.step_plan",
    "plan_step": "jfleet._planning.step_plan",
    "save_group_sharded_model": "jfleet.save",
    "topology_devices": "jfleet._tuning.target",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'jfleet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
