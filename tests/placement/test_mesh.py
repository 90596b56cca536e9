"""Meshes, groups and batches."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jfleet
from jfleet import mesh as mesh_module


@pytest.fixture(autouse=True)
def _forget_the_mesh(monkeypatch):
    monkeypatch.setattr(mesh_module, "_current", None)


def test_default_is_one_data_axis_over_all_devices():
    mesh = jfleet.init()
    assert dict(mesh.shape) == {"data": 8}
    assert mesh.axis_types == (AxisType.Auto,)


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        ({"replica": 2, "shard": 4}, {"replica": 2, "shard": 4}),
        ({"replica": 2, "shard": -1}, {"replica": 2, "shard": 4}),
        ({"x": -1, "model": 8}, {"x": 1, "model": 8}),
    ],
)
def test_shapes(asked, got):
    assert dict(jfleet.init(asked).shape) == got


def test_explicit_axes_on_request():
    assert jfleet.init(explicit=True).axis_types == (AxisType.Explicit,)


def test_init_again_gives_the_same_mesh():
    mesh = jfleet.init({"data": 8})
    assert jfleet.init() is mesh
    assert jfleet.init({"data": -1}) == mesh


def test_init_again_with_another_shape_raises():
    jfleet.init()
    with pytest.raises(jfleet.ConfigError, match="called before"):
        jfleet.init({"data": 4, "model": 2})


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ({"data": 3}, "covers 3 devices but there are 8"),
        ({"data": 4}, "covers 4 devices but there are 8"),
        ({"data": 0}, "at least 1"),
        ({"data": -2}, "at least 1"),
        ({"a": -1, "b": -1}, "only one size"),
        ({"a": 3, "b": -1}, "covers 3 devices"),
    ],
)
def test_bad_shapes(shape, match):
    with pytest.raises(jfleet.ConfigError, match=match):
        jfleet.init(shape)


@pytest.mark.parametrize("shape", [(2, 4), {"a": "8"}, {1: 8}, {"a": True}, {}])
def test_shapes_of_the_wrong_type(shape):
    with pytest.raises(TypeError, match="mesh_shape"):
        jfleet.init(shape)


def test_a_bad_call_leaves_no_mesh_behind():
    with pytest.raises(jfleet.ConfigError):
        jfleet.init({"data": 3})
    assert dict(jfleet.init({"a": 2, "b": 4}).shape) == {"a": 2, "b": 4}


def test_devices_can_be_chosen():
    mesh = jfleet.init({"data": -1}, devices=jax.devices()[2:5])
    assert list(mesh.devices.flat) == jax.devices()[2:5]


def test_new_group():
    mesh = jfleet.new_group([1, 3, 5])
    assert list(mesh.devices.flat) == [jax.devices()[i] for i in (1, 3, 5)]


@pytest.mark.parametrize("ranks", [[], [0, 0], [8], [-1]])
def test_new_group_refuses(ranks):
    with pytest.raises(jfleet.ConfigError, match="ranks"):
        jfleet.new_group(ranks)


def test_distributed_of_the_wrong_type():
    with pytest.raises(jfleet.ConfigTypeError, match="distributed"):
        jfleet.init(distributed="yes")


def test_a_failed_connection_is_a_typed_error():
    with pytest.raises(jfleet.DistributedError, match="before any other use"):
        jfleet.init(distributed={"coordinator_address": "127.0.0.1:1"})


class TestShardBatch:
    def test_rows_are_split_over_all_data_axes(self):
        mesh = jax.make_mesh(
            (2, 2, 2), ("replica", "shard", "model"), axis_types=(AxisType.Auto,) * 3
        )
        batch = jfleet.shard_batch({"x": np.ones((8, 3)), "n": 5}, mesh=mesh)
        assert batch["x"].sharding.spec == PartitionSpec(("replica", "shard"))
        assert batch["n"].sharding.is_fully_replicated

    def test_values_are_kept(self):
        x = np.arange(24).reshape(8, 3)
        got = jfleet.shard_batch(x, mesh=jfleet.new_group(range(4)))
        np.testing.assert_array_equal(got, x)

    def test_b105_rows_that_do_not_divide_name_the_leaf(self):
        mesh = jfleet.new_group(range(8))
        with pytest.raises(ValueError) as error:
            jfleet.shard_batch({"inputs": {"ids": np.ones((30, 4))}}, mesh=mesh)
        for text in ("inputs/ids", "(30, 4)", "'data': 8", "P('data',)"):
            assert text in str(error.value)

    def test_text_is_refused(self):
        mesh = jfleet.new_group(range(8))
        with pytest.raises(TypeError, match="names"):
            jfleet.shard_batch({"names": np.array(["a"] * 8)}, mesh=mesh)

    def test_explicit_axes(self):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
        x = jfleet.shard_batch(np.ones((8, 3)), mesh=mesh)
        assert jax.typeof(x).sharding.spec == PartitionSpec("data", None)
