"""Profiles: their files, and what is said of wrong ones."""

from dataclasses import replace

from penstock.values import LayerProfile, Profile
from penstock.values.crossings import Crossing

LAYER = LayerProfile("h.0", 0.25, 0.5, 10, 20, 30, 40)


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
        '"parameter_bytes": 30, "workspace_bytes": 40, "update_seconds": 0.0},\n'
        '    {"name": "h.0", "forward_seconds": 0.25, "backward_seconds": 0.5, "cut_bytes": 10, "saved_bytes": 20, '
        '"parameter_bytes": 30, "workspace_bytes": 40, "update_seconds": 0.0}\n'
        "  ]\n"
        "}\n"
    )


def test_a_file_without_workspaces_and_updates_has_none(tmp_path):
    path = tmp_path / "profile.json"
    Profile((LAYER, LAYER), 8).save(path)
    path.write_text(path.read_text().replace(', "workspace_bytes": 40, "update_seconds": 0.0', ""))

    assert [(layer.workspace_bytes, layer.update_seconds) for layer in Profile.load(path).layers] == [(0, 0)] * 2


def test_what_is_frozen_is_in_the_file_where_there_is_any(tmp_path):
    path = tmp_path / "profile.json"
    Profile((LAYER, replace(LAYER, frozen_bytes=50)), 8).save(path)

    assert path.read_text().count('"frozen_bytes": 50') == path.read_text().count("frozen_bytes") == 1
    assert (Profile.load(path).frozen_bytes, Profile.load(path).parameter_bytes) == (50, 60)


def test_totals_are_sums_over_the_layers():
    profile = Profile((LAYER, LAYER, LAYER), 8)

    assert (len(profile), profile.seconds, profile.parameter_bytes, profile.frozen_bytes) == (3, 2.25, 90, 0)
    assert profile.prefix(2) == Profile((LAYER, LAYER), 8)


def test_what_no_layer_gives_stays_as_it_is() -> None:
    profile = Profile((LAYER, LAYER), 8, library_bytes=64e6, fragmentation=1.2, split_share=0.1)

    for made in (profile.prefix(1), profile.scaled(2)):
        assert (made.library_bytes, made.fragmentation, made.split_share) == (64e6, 1.2, 0.1)


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
