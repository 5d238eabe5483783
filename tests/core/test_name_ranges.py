"""Names of weights in few words, of which none is lost."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from flexor.core.name_ranges import grouped, listed


def expanded(group: str) -> list[str]:
    """The names that a group stands for."""
    parts = []
    for part in group.replace("..", "~").split("."):
        words = []
        for word in part.strip("{}").split(","):
            first, _, last = word.partition("~")
            words += [str(n) for n in range(int(first), int(last) + 1)] if last else [word]
        parts.append(words)
    return [".".join(name) for name in product(*parts)]


def test_layers_are_a_range_and_their_parts_a_list():
    names = [f"model.layers.{n}.{part}.weight" for n in range(18) for part in ("k_proj", "q_proj")]
    assert grouped(names) == ["model.layers.{0..17}.{k_proj,q_proj}.weight"]
    without = [name for name in names if name != "model.layers.4.k_proj.weight"]
    assert grouped(without) == [
        "model.layers.{0..17}.q_proj.weight",
        "model.layers.{0..3,5..17}.k_proj.weight",
    ]


def test_names_without_numbers_stay_as_they_are():
    assert grouped(["b.weight", "b.bias", "a.weight"]) == ["a.weight", "b.bias", "b.weight"]
    assert listed(["b.bias", "a.weight"]) == "a.weight, b.bias" and listed([]) == "nothing"
    assert listed(["a", "b", "c", "d"]) == "4 weights\n  a\n  b\n  c\n  d"


PART = st.sampled_from(["a", "b", "0", "1", "2", "10"])


@given(st.sets(st.lists(PART, min_size=1, max_size=4).map(".".join), max_size=40))
def test_no_name_is_lost_and_none_is_added(names):
    back = [name for group in grouped(names) for name in expanded(group)]
    assert sorted(back) == sorted(names)
