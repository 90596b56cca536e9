"""Tests in this folder start processes, which inherit nothing that sets JAX up."""

import os

import pytest

from tests.processes import start


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    env = start.clean_environment()
    for name in list(os.environ):
        # Tests in this process still need what importing JAX has set.
        if name not in env and name != "TPU_SKIP_MDS_QUERY":
            monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
