"""Set up the simulated devices before anything else touches JAX."""

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")


@pytest.fixture(scope="session", autouse=True)
def _eight_devices():
    assert jax.device_count() == 8, (
        f"the tests need 8 simulated CPU devices, got {jax.device_count()}"
    )
