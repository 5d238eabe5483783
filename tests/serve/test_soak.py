"""A short version of benchmarks/soak_serve.py."""

from support.limits import LIMIT_S, wait_for
from support.serving import numbers, serving
from support.soaking import IMAGE, Soak


def test_clients_that_come_go_die_and_attack_cost_others_nothing():
    with serving(numbers(image=IMAGE), requests_per_s=1e6) as (url, server):
        soak = Soak(url, requests=400, deadline_s=LIMIT_S)
        soak.run()
        wait_for(lambda: not server.model.clients)
        assert not server.model.batcher.pauses and not server.model.batcher.waiting
    assert soak.wrong == []
    kinds = ("left", "died", "noise", "attacks", "costly", "unfinished", "floods")
    assert soak.counts["answered"] >= 400 and min(soak.counts[kind] for kind in kinds) > 0
