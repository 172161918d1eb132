"""Profiles: their files, and what is said of wrong ones."""

import json
import math

import pytest
from hypothesis import given

from penstock.errors import ProfileError
from penstock.values import LayerProfile, Profile
from penstock.values.crossings import Crossing
from support.strategies import profiles

LAYER = LayerProfile("h.0", 0.25, 0.5, 10, 20, 30, 40)


@given(profiles())
def test_a_file_gives_back_the_profile(tmp_path_factory, profile):
    path = tmp_path_factory.getbasetemp() / "profile.json"
    profile.save(path)

    assert Profile.load(path) == profile


def test_a_file_has_a_line_per_layer(tmp_path):
    path = tmp_path / "profile.json"
    Profile((LAYER, LAYER), 8, "gpt", "cpu").save(path)

    assert path.read_text() == (
        "{\n"
        '  "format": "penstock-profile/1",\n'
        '  "name": "gpt",\n'
        '  "device": "cpu",\n'
        '  "microbatch_size": 8,\n'
        '  "layers": [\n'
        '    {"name": "h.0", "forward_seconds": 0.25, "backward_seconds": 0.5, "cut_bytes": 10, "saved_bytes": 20, '
        '"parameter_bytes": 30, "workspace_bytes": 40},\n'
        '    {"name": "h.0", "forward_seconds": 0.25, "backward_seconds": 0.5, "cut_bytes": 10, "saved_bytes": 20, '
        '"parameter_bytes": 30, "workspace_bytes": 40}\n'
        "  ]\n"
        "}\n"
    )


def test_a_file_without_workspaces_has_none(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(broken())

    assert [layer.workspace_bytes for layer in Profile.load(path).layers] == [0, 0]


def test_totals_are_sums_over_the_layers():
    profile = Profile((LAYER, LAYER, LAYER), 8)

    assert (len(profile), profile.seconds, profile.parameter_bytes) == (3, 2.25, 90)
    assert profile.prefix(2) == Profile((LAYER, LAYER), 8)


def test_what_no_layer_gives_stays_as_it_is() -> None:
    profile = Profile((LAYER, LAYER), 8, library_bytes=64e6, fragmentation=1.2, split_share=0.1)

    for made in (profile.prefix(1), profile.scaled(2)):
        assert (made.library_bytes, made.fragmentation, made.split_share) == (64e6, 1.2, 0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerProfile("a", -1.0, 0, 0, 0, 0), "forward_seconds: expected a number of sec"),
        (lambda: LayerProfile("a", 0, math.nan, 0, 0, 0), "backward_seconds: .*found nan in layer 'a'"),
        (lambda: LayerProfile("a", 0, 0, math.inf, 0, 0), "cut_bytes: expected a number of bytes .*found inf"),
        (lambda: LayerProfile("a", 0, 0, 0, "20", 0), "saved_bytes: .*found '20'"),
        (lambda: LayerProfile("a", 0, 0, 0, 0, True), "parameter_bytes: .*found True"),
        (lambda: LayerProfile(3, 0, 0, 0, 0, 0), "name: expected text, found 3"),
        (lambda: Profile((), 1), "layers: expected one layer or more"),
        (lambda: Profile((LAYER, 3), 1), r"layers\[1\]: expected a LayerProfile, found 3"),
        (lambda: Profile((LAYER,), 0), "microbatch_size: expected a whole number of samples, 1 or more, found 0"),
        (lambda: Profile((LAYER,), 2.5), "microbatch_size: .*found 2.5"),
        (lambda: Profile((LAYER,), 2, split_share=-0.1), "split_share: expected a number from 0 to"),
        (lambda: Profile((LAYER,), 2, library_bytes=-1), "library_bytes: expected a number from 0 to"),
        (lambda: Profile((LAYER,), 2, fragmentation=0.9), "fragmentation: expected a number from 1 to .*, found 0.9"),
    ],
)
def test_a_wrong_profile_says_where(make, message):
    with pytest.raises(ProfileError, match=message):
        make()


def broken(**changes):
    """The text of a profile of two layers, with changes to its second layer; None removes a key."""
    layer = {"name": "a", "forward_seconds": 1, "backward_seconds": 1, "cut_bytes": 1, "saved_bytes": 1}
    layer = {**layer, "parameter_bytes": 1}
    changed = {key: value for key, value in {**layer, **changes}.items() if value is not None}
    return json.dumps({"format": "penstock-profile/1", "microbatch_size": 4, "layers": [layer, changed]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "format: expected 'penstock-profile/1', found nothing"),
        ('{"format":\n  penstock}', "line 2, column 3: not JSON: Expecting value"),
        ('{"format": "penstock-profile/1", "format": "x"}', "the key 'format' is written twice"),
        ('{"format": "penstock-profile/1", "layers": []}', "the key 'microbatch_size' is missing"),
        (broken(cut_byte=3), r"layers\[1\]: unknown key 'cut_byte'.*Did you mean 'cut_bytes'\?"),
        (broken(cut_bytes=None), r"layers\[1\]: the key 'cut_bytes' is missing"),
        (broken(cut_bytes="3"), r"layers\[1\].cut_bytes: expected a number, found '3'"),
        (broken(cut_bytes=-3), r"layers\[1\].cut_bytes: expected a number of bytes from 0 to 1e\+30, found -3"),
        (broken(cut_bytes=1e308), r"layers\[1\].cut_bytes: expected .* to 1e\+30, found 1e\+308"),
        (broken(cut_bytes=math.nan), r"layers\[1\].cut_bytes: expected .*found nan"),
        (broken(name=7), r"layers\[1\].name: expected text, found 7"),
        (broken().replace("4", "4.5"), "microbatch_size: expected a whole number, found 4.5"),
        (broken().replace("4", "0"), "microbatch_size: expected a whole number of samples, 1 or more, found 0"),
    ],
)
def test_a_wrong_file_names_itself_the_field_and_the_fix(tmp_path, text, message):
    path = tmp_path / "profile.json"
    path.write_text(text)

    with pytest.raises(ProfileError, match=message) as caught:
        Profile.load(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_missing_file_and_a_directory_are_refused(tmp_path):
    with pytest.raises(ProfileError, match="no such file"):
        Profile.load(tmp_path / "profile.json")
    with pytest.raises(ProfileError, match="cannot be read"):
        Profile.load(tmp_path)


def sending(*wire: float | None) -> Profile:
    """Layers of 10 bytes each, of which links carry this many; the first is read by the last, too."""
    layers = tuple(LayerProfile("", 1, 2, 10, 20, 30, 40, wire_bytes=each) for each in wire)
    return Profile(layers, 8, crossings=(Crossing("early", 0, (1, len(wire) - 1), 6, wire[0]),))


def test_what_links_carry_is_kept_in_the_file(tmp_path):
    for profile in (sending(5, 2.5, 0), sending(None, 3, None), sending(None, None, None)):
        profile.save(tmp_path / "profile.json")

        assert Profile.load(tmp_path / "profile.json") == profile


def test_a_profile_on_the_wire():
    profile = sending(5, 2.5, None)

    assert [layer.cut_bytes for layer in profile.on_wire.layers] == [5, 2.5, 10]
    assert profile.on_wire.crossings[0].size_bytes == 5
    assert [layer.wire_bytes for layer in profile.scaled(16).layers] == [10, 5, None]
    assert profile.scaled(16).crossings[0].wire_bytes == 10
    plain = sending(None, None, None)
    assert plain.on_wire is plain


def test_a_share_of_what_crosses():
    profile = sending(None, None, None).with_wire_share(0.25)

    assert [layer.wire_bytes for layer in profile.layers] == [2.5, 2.5, 2.5]
    assert profile.crossings[0].wire_bytes == 1.5
    with pytest.raises(ProfileError, match="share: expected a number from 0 to 1, found 2"):
        profile.with_wire_share(2)


def test_links_carry_no_more_than_what_crosses():
    with pytest.raises(ProfileError, match=r"wire_bytes: expected at most cut_bytes = 10, .*found 11"):
        sending(11, 1)
    with pytest.raises(ProfileError, match=r"crossings.0.: wire_bytes: expected a number of bytes from 0 to"):
        Profile((LAYER, LAYER), 8, crossings=(Crossing("", 0, (1,), 6, -1),))
