"""A short version of benchmarks/soak_serve.py."""

from support.limits import wait_for
from support.serving import numbers, serving
from support.soaking import Soak


def test_clients_that_come_go_die_and_attack_cost_others_nothing():
    with serving(numbers(), requests_per_s=1e6) as (url, server):
        soak = Soak(url, requests=400)
        soak.run()
        wait_for(lambda: not server.model.clients)
        assert not server.model.batcher.pauses and not server.model.batcher.waiting
    assert soak.wrong == []
    assert soak.found["answered"] >= 400 and min(soak.found[kind] for kind in ("left", "died", "hostile")) > 0
