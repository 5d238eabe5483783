"""The interface that gloo gets; `distributed/test_hosts.py` has hosts whose own names are no help."""

import os

import pytest
import torch.distributed as dist

from flexor.train.ranks.gloo_interface import (
    INTERFACE,
    choose_interface,
    describe_name,
    find_interface,
    find_route,
)


@pytest.fixture(autouse=True)
def first_host(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.delenv(INTERFACE, raising=False)


def test_the_interface_with_an_address():
    assert find_interface(["192.0.2.1"]) is None  # an address that no host has
    assert find_interface(["192.0.2.1", "127.0.0.1"]) in ("lo", "lo0")


def test_a_name_that_nobody_has():
    assert find_route("name.invalid", 1) is None
    assert "name.invalid can't be resolved here: " in describe_name("name.invalid")
    assert describe_name("127.0.0.1") == ""


def test_what_the_user_chose_stays(monkeypatch):
    monkeypatch.setenv(INTERFACE, "eth7")
    choose_interface(0, 2, dist.HashStore())  # and waits for nobody
    assert os.environ[INTERFACE] == "eth7"


def test_loopback_addresses_are_no_choice():
    choose_interface(0, 1, dist.HashStore())
    assert INTERFACE not in os.environ
