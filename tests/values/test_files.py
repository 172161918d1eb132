"""Whatever is saved is loaded again."""

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.values.transformers import Transformer
from support.strategies import clusters, plans, profiles

transformers = st.builds(
    lambda layers, heads, name: Transformer(layers, 8 * heads, heads, 512, 1000, name),
    st.integers(1, 99),
    st.integers(1, 9),
    st.text(max_size=9),
)


@settings(max_examples=100)
@given(st.one_of(profiles(), plans(), clusters(), transformers))
def test_a_file_gives_back_what_was_saved(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "value"
    value.save(path)

    assert type(value).load(path) == value
