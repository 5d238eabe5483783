"""Links between GPUs: their names, and how long GPUs take to exchange tensors over them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexor.core.errors import ConfigError
from flexor.plan.site.hardware import load_hardware
from flexor.plan.site.links import Interconnect, Links, links_of

H200, RTX_4090 = (load_hardware().find(name) for name in ("H200", "RTX 4090"))
MB = 1e6


@pytest.mark.parametrize(
    ("name", "gb_s"), [(None, 450), ("nvlink", 450), ("pcie", 63.008), ("PCIe", 63.008), ("40", 40)]
)
def test_the_gpus_of_a_node_have_the_fastest_link_unless_another_is_named(name: str | None, gb_s: float):
    inside = links_of(H200, 8, interconnect=name).inside
    assert inside.bandwidth == pytest.approx(gb_s * 1e9)
    assert inside.name == ("PCIe" if name and "pci" in name.lower() else "NVLink")
    assert links_of(RTX_4090, 2).inside.name == "PCIe"


@pytest.mark.parametrize(
    ("name", "kind", "gbit"),
    [
        (None, "Ethernet", 100),
        ("ethernet", "Ethernet", 100),
        ("ethernet:25", "Ethernet", 25),
        ("10", "Ethernet", 10),
        ("infiniband", "InfiniBand", 3200),
        ("infiniband:200", "InfiniBand", 200),
    ],
)
def test_nodes_have_a_network(name: str | None, kind: str, gbit: float):
    between = links_of(H200, 8, 2, network=name).between
    assert (between.name, between.bandwidth * 8 / 1e9) == (kind, pytest.approx(gbit))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"interconnect": "nvlink"}, "--interconnect=nvlink: the RTX 4090 has no NVLink"),
        ({"interconnect": "wires"}, "--interconnect=wires must be one of nvlink, pcie, or GB/s"),
        ({"interconnect": "-1"}, "--interconnect=-1 must be"),
        ({"network": "pigeons"}, "--network=pigeons must be one of ethernet, infiniband, or Gbit/s"),
        ({"network": "infiniband:fast"}, "--network=infiniband:fast must be"),
        ({"network": "inf"}, "--network=inf must be"),
    ],
)
def test_other_names_are_refused(more: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=message):
        links_of(RTX_4090, 2, 2, **more)


def test_an_exchange_by_hand():
    inside = Interconnect("inside", share=0.5, latency=1e-3, bandwidth=200 * MB)
    between = Interconnect("between", share=1.0, latency=2e-3, bandwidth=10 * MB)
    assert Links(4, 1, inside, between).all_reduce(100 * MB) == pytest.approx(1e-3 + 2 * 3 / 4)
    assert Links(1, 2, inside, between).all_reduce(100 * MB) == pytest.approx(2e-3 + 10)
    both = Links(4, 2, inside, between)
    assert both.all_reduce(100 * MB) == pytest.approx(3e-3 + 10)  # between nodes all four have 25 MB each
    assert both.gather(100 * MB) == pytest.approx(3e-3 + 5)
    assert (both.within_nodes().world_size, both.between_nodes().world_size) == (4, 2)
    assert str(both) == "inside (0.2 GB/s) in a node, between (0.01 GB/s) between nodes"


def test_one_gpu_exchanges_nothing():
    assert links_of(H200, 1).all_reduce(100 * MB) == 0 and str(links_of(H200, 1)) == ""


@given(st.integers(1, 8), st.integers(1, 4), st.floats(1, 1e9), st.sampled_from(["10", "100", "infiniband"]))
def test_more_gpus_and_slower_links_take_longer(gpus: int, nodes: int, nbytes: float, network: str):
    def seconds(gpus: int, nodes: int, network: str = network, interconnect: str = "nvlink") -> float:
        return links_of(H200, gpus, nodes, interconnect, network).all_reduce(nbytes)

    least = seconds(gpus, nodes)
    infiniband = network == "infiniband"  # each further GPU brings a card of its own
    assert infiniband or seconds(gpus + 1, nodes) >= least
    assert seconds(gpus, nodes + 1) >= least
    assert seconds(gpus, nodes, interconnect="pcie") >= least
    assert seconds(gpus, nodes, network="1") >= least
    assert links_of(H200, gpus, nodes, None, network).over_gloo().all_reduce(nbytes) >= least
