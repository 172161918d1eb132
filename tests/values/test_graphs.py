"""Graphs become chains: by hand with known cuts, at random against brute force, and PipeDream's five profiles."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.values import Profile
from penstock.values.graphs import Graph, Operator, Tensor, linearize, read_graph
from support.paths import PIPEDREAM

FILES = PIPEDREAM
MODELS = ("gnmt", "resnet18", "resnet50", "squeezenet1_0", "vgg16")


def graph(count, *tensors):
    operators = tuple(Operator(f"op{index}", 1.0, 2.0, 4, 8) for index in range(count))
    return Graph(operators, tuple(Tensor(*tensor) for tensor in tensors))


def test_a_diamond_counts_the_tensor_that_two_branches_read_once():
    """a -> b, c -> d: the output of a (5) still crosses after b (2), since c reads it."""
    diamond = graph(4, (0, 5, (1, 2)), (1, 2, (3,)), (2, 3, (3,)), (3, 1, (), True))

    assert linearize(diamond) == ((0, 5), (1, 5 + 2), (2, 2 + 3), (3, 1))


def test_several_tensors_of_one_operator_cross_each_on_its_own():
    """a makes 3 and 4; b reads the first, c the second."""
    both = graph(3, (0, 3, (1,)), (0, 4, (2,)), (1, 1, (2,)), (2, 1, (), True))

    assert linearize(both) == ((0, 7), (1, 5), (2, 1))


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 6))
    tensors = []
    for producer in range(count):
        later = (
            st.lists(st.integers(producer + 1, count - 1), unique=True, max_size=3)
            if producer + 1 < count
            else st.just([])
        )
        readers = draw(later)
        tensors.append((producer, draw(st.integers(0, 9)), tuple(sorted(readers)), not readers))
    return graph(count, *tensors)


@given(graphs())
def test_no_order_has_less_crossing_bytes(random_graph):
    """Against all permutations that respect the graph, with the cuts counted afresh."""

    def totals():
        for order in permutations(range(len(random_graph.operators))):
            place = {operator: step for step, operator in enumerate(order)}
            if all(place[t.producer] < place[reader] for t in random_graph.tensors for reader in t.readers):
                yield sum(
                    t.bytes
                    * (
                        len(order) - place[t.producer]
                        if t.output
                        else max(map(place.get, t.readers)) - place[t.producer]  # type: ignore[type-var]
                    )
                    for t in random_graph.tensors
                )

    chain = linearize(random_graph)

    assert sorted(operator for operator, _ in chain) == list(range(len(random_graph.operators)))
    assert sum(crossing for _, crossing in chain) == min(totals())


def read_raw(model):
    """(description, numbers) per node and the edges of a graph.txt, read without Penstock."""
    nodes, edges = {}, []
    for line in (FILES / model / "graph.txt").read_text().splitlines():
        if line[:1].isspace():
            edges.append(tuple(line.split(" -- ")[i].strip() for i in range(2)))
        elif line:
            key, text, numbers = line.split(" -- ")[:3]
            values = dict(pair.split("=") for pair in numbers.split(", "))
            nodes[key] = (text, values)
    kept = {key for key, (text, _) in nodes.items() if not text.startswith("Input")}
    return {key: nodes[key] for key in kept}, [edge for edge in edges if edge[0] in kept and edge[1] in kept]


@pytest.mark.parametrize("model", MODELS)
def test_times_and_weights_are_conserved(model):
    nodes, _ = read_raw(model)
    profile = Profile.from_pipedream(FILES / model / "graph.txt")

    def total(name):
        return sum(float(values[name]) for _, values in nodes.values())

    assert profile.name == model
    assert sum(layer.forward_seconds for layer in profile.layers) == pytest.approx(total("forward_compute_time") / 1e3)
    assert sum(layer.backward_seconds for layer in profile.layers) == pytest.approx(
        total("backward_compute_time") / 1e3
    )
    assert profile.parameter_bytes == total("parameter_size")


@pytest.mark.parametrize("model", MODELS)
def test_every_cut_is_crossed_by_all_that_is_read_behind_it(model):
    """Counted on the raw file: each producer's tensors once, those taken by ``__getitem__`` one by one."""
    nodes, edges = read_raw(model)
    profile = Profile.from_pipedream(FILES / model / "graph.txt")
    parents = {target: source for source, target in edges}
    place = {layer.name.split()[0]: index for index, layer in enumerate(profile.layers)}
    spans = {}
    for source, target in edges:
        if target in place:
            taken = source not in place
            owner = parents[source] if taken else source
            tensor = (owner, nodes[source][0] if taken else "whole")
            size = sum(float(part) for part in nodes[source][1]["activation_size"].strip("[]").split(";"))
            last = max(place[target], spans.get(tensor, (0, 0, 0))[2])
            spans[tensor] = (size, place[owner], last)

    assert [layer.cut_bytes for layer in profile.layers[:-1]] == [
        sum(size for size, first, last in spans.values() if first <= cut < last) for cut in range(len(profile) - 1)
    ]


def count_down_sets(nodes, edges):
    """How many sets of nodes, not empty, hold with every node all that it depends on."""
    numbers = {key: number for number, key in enumerate(nodes)}
    needs = [0] * len(nodes)
    for source, target in edges:
        needs[numbers[target]] |= 1 << numbers[source]
    seen, waiting = {0}, [0]
    while waiting:
        inside = waiting.pop()
        for node, need in enumerate(needs):
            grown = inside | 1 << node
            if not need & ~inside and grown not in seen:
                seen.add(grown)
                waiting.append(grown)
    return len(seen) - 1


@pytest.mark.parametrize(
    ("model", "states"), [("vgg16", 40), ("squeezenet1_0", 99), ("resnet18", 100), ("resnet50", 240)]
)
def test_the_antichains_of_pipedreams_optimizer_are_our_down_sets(model, states):
    """Counts of the authors' program. (Of GNMT, with three sources, it visits 99: those behind its first source.)"""
    assert count_down_sets(*read_raw(model)) == states
    translated = read_graph(FILES / model / "graph.txt").graph
    edges = [(t.producer, reader) for t in translated.tensors for reader in t.readers]
    assert count_down_sets(range(len(translated.operators)), edges) == states


def test_the_minibatch_size_comes_from_the_images_or_the_caller():
    sizes = {model: Profile.from_pipedream(FILES / model / "graph.txt").microbatch_size for model in MODELS}

    assert sizes == {"gnmt": 1, "resnet18": 256, "resnet50": 128, "squeezenet1_0": 256, "vgg16": 128}
    assert Profile.from_pipedream(FILES / "gnmt" / "graph.txt", microbatch_size=64).microbatch_size == 64


def node(key, text, size="1.0", times="1.0, backward_compute_time=2.0"):
    return f"{key} -- {text} -- forward_compute_time={times}, activation_size={size}, parameter_size=4.0"


def test_items_stand_for_their_producers_tensors(tmp_path):
    """An item repeats bytes of its producer; two readers of it, and a cut between, count them once."""
    path = tmp_path / "graph.txt"
    lines = [
        node("node10", "Linear(1, 1)", "6.0"),
        node("node1", "Input0", "9.0", "99.0, backward_compute_time=0.0"),
        node("node2", "LSTM(a=1, b=2)", "[10.0; 20.0; 40.0]") + " -- stage_id=3",
        node("node3", "__getitem__(0)", "10.0", "0.0, backward_compute_time=0.0"),
        node("node4", "__getitem__(1)", "20.0", "0.0, backward_compute_time=0.0"),
        node("node5", "Dropout(p=0.2)", "5.0"),
        "\tnode1 -- node2",
        "    node2 -- node3",
        "\tnode2 -- node4",
        "\tnode3 -- node5",
        "\tnode3 -- node10",
        "\tnode5 -- node10",
    ]
    path.write_text("\n".join(lines))
    layers = Profile.from_pipedream(path, 1).layers

    assert [layer.name for layer in layers] == ["node2 LSTM", "node5 Dropout", "node10 Linear"]
    assert [layer.cut_bytes for layer in layers] == [10, 10 + 5, 6]
    assert [layer.saved_bytes for layer in layers] == [70, 5, 6]
    assert [layer.parameter_bytes for layer in layers] == [12, 4, 4]
    assert [layer.forward_seconds for layer in layers] == [1e-3, 1e-3, 1e-3]


def cells(count: int) -> Graph:
    """A graph like NASNet's: a cell has five blocks, each the sum of two branches of several operators, and reads the
    two cells before it.
    """
    operators: list[Operator] = []
    edges: dict[int, list[int]] = {}

    def add(*reads: int, size: float) -> int:
        operators.append(Operator(str(len(operators)), 1.0, 2.0, 0.0, size))
        for read in reads:
            edges.setdefault(read, []).append(len(operators) - 1)
        return len(operators) - 1

    older = newer = add(size=8)
    for _ in range(count):
        sums = []
        for block in range(5):
            ends = []
            for branch in range(2):
                end = older if (block + branch) % 2 else newer
                for _ in range(4):
                    end = add(end, size=2)
                ends.append(end)
            sums.append(add(*ends, size=2))
        older, newer = newer, add(*sums, size=10)
    sizes = [operator.output_bytes for operator in operators]
    tensors = (Tensor(made, sizes[made], tuple(readers)) for made, readers in edges.items())
    return Graph(tuple(operators), (*tensors, Tensor(newer, 10, (), True)))


@pytest.mark.sampled(0)
def test_a_graph_of_cells_with_many_branches_becomes_a_chain_in_seconds() -> None:
    """Its levels have many thousands of down-sets; the cuts between cells are where they should be."""
    wide = cells(4)

    order = linearize(wide)

    assert sorted(operator for operator, _ in order) == list(range(len(wide.operators)))
    narrow = [bytes_ for _, bytes_ in order if bytes_ <= 20]
    assert len(narrow) >= 4
    placed = [operator for operator, _ in order]
    for tensor in wide.tensors:
        assert all(placed.index(tensor.producer) < placed.index(reader) for reader in tensor.readers)


def test_a_graph_that_is_far_too_wide_is_refused() -> None:
    with pytest.raises(ValueError, match="the graph of 93 operators is too wide to be made a chain"):
        linearize(cells(2), most_choices=1000)
