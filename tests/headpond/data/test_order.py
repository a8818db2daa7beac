from collections import Counter

import pytest

from headpond.data.order import Shuffle, example_at, key


@pytest.mark.parametrize("size", [1, 2, 3, 6, 7, 16, 97, 1000, 4099])
def test_every_position_has_an_example_of_its_own(size: int) -> None:
    for epoch in range(3):
        assert sorted(map(Shuffle(size, key(5, "sums", epoch)).at, range(size))) == list(range(size))


def test_a_position_of_ten_million_examples_needs_none_of_the_others() -> None:
    shuffle = Shuffle(10_000_000, key(0, "sums", 0))
    drawn = [shuffle.at(position) for position in range(20_000)]
    assert len(set(drawn)) == 20_000
    assert all(0 <= example < 10_000_000 for example in drawn)
    tenths = Counter(example // 1_000_000 for example in drawn)
    assert all(1_700 < tenths[tenth] < 2_300 for tenth in range(10))  # 2,000 each, six deviations


@pytest.mark.parametrize("size", [4, 6, 10])
def test_every_example_comes_first_as_often_as_any_other(size: int) -> None:
    epochs = 400 * size
    orders = [tuple(map(Shuffle(size, key(1, epoch)).at, range(size))) for epoch in range(epochs)]
    for position in (0, size - 1):
        counts = Counter(order[position] for order in orders)
        assert all(300 < counts[example] < 500 for example in range(size)), counts
    follows = sum((order[1] - order[0]) % size == 1 for order in orders)
    assert follows < 2 * epochs / (size - 1)


def test_an_order_depends_on_seed_environment_and_epoch_only() -> None:
    def epoch(number: int, seed: int = 3, name: str = "sums") -> list[int]:
        places = range(100 * number, 100 * (number + 1))
        return [example_at(place, size=100, order="shuffled", seed=seed, name=name) for place in places]

    orders = [epoch(0), epoch(1), epoch(0, seed=4), epoch(0, name="words")]
    assert len({tuple(order) for order in orders}) == 4
    assert orders[0][:8] == EXPECTED  # a resumed run continues the order of the release that began it


EXPECTED = [35, 68, 66, 6, 71, 27, 57, 1]


def test_in_order_every_epoch_is_the_same() -> None:
    drawn = [example_at(number, size=3, order="in_order", seed=1, name="sums") for number in range(7)]
    assert drawn == [0, 1, 2, 0, 1, 2, 0]
