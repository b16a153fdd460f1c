"""Looking a configuration up: whose folder wins, which row serves, and that what is passed over is named."""

import json
import os

import pytest
from moe_kernels.experts.config import flatten_config
from moe_kernels.tuning import (
    PACKAGED,
    Problem,
    add_config_folder,
    config_folders,
    find_config,
    lookup,
    remove_config_folder,
)
from moe_kernels.tuning.names import parse_name

H200 = 232448
SORTED = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
}
TOKEN = {**SORTED, "BLOCK_SIZE_M": 1, "LAYOUT": "token"}
INLINE = {**SORTED, "LAYOUT": "inline"}
NAME = "E=4,N=96,device_name=NVIDIA_H200"


@pytest.fixture(autouse=True)
def plain_world(monkeypatch):
    """No folder of the user's, and triton 3.6.0."""
    monkeypatch.delenv("MOE_WORKBENCH_CONFIG_DIR", raising=False)
    monkeypatch.setattr(lookup, "running_triton", lambda: "3.6.0")
    monkeypatch.setattr(lookup, "_answers", {})
    for folder in config_folders():
        remove_config_folder(folder)
    yield
    for folder in config_folders():
        if not os.environ.get("MOE_WORKBENCH_CONFIG_DIR"):
            remove_config_folder(folder)


def problem(tokens=8, quant="bf16", top_k=2, group_size=0):
    return Problem(tokens, 4, 128, 96, top_k, quant, "bf16", group_size)


def find(tokens=8, device="NVIDIA H200", **options):
    return find_config(problem(tokens, **options), device, H200)


def both(row, **more):
    return {"up": row, "down": row, "PDL": False, **more}


def write(folder, rows, name=f"{NAME}_modes.json"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(rows), encoding="utf-8")


@pytest.fixture
def user(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_WORKBENCH_CONFIG_DIR", str(tmp_path / "user"))
    (tmp_path / "user").mkdir()
    return tmp_path / "user"


def test_nothing_is_found_where_nothing_was_tuned():
    assert find() == (None, "No tuned row for E=4, D=128, F=96, K=2, bf16 on NVIDIA H200.")


@pytest.mark.parametrize("place", ["", "triton_3_6_0", "configs/triton_3_6_0", "configs", "triton_3_6_2"])
def test_every_layout_of_folders_is_read(user, place):
    write(user / place, {"8": both(SORTED)})
    found = find()
    assert found.config == both(SORTED)
    assert found.source == (
        f"Tuned on NVIDIA H200 for E=4, D=128, F=96, K=2, bf16 at 8 tokens: {(user / place / f'{NAME}_modes.json')}."
    )


def test_the_row_of_the_count_then_the_next_larger_then_the_largest(user):
    rows = {str(count): both({**SORTED, "GROUP_SIZE_M": count}) for count in (4, 16, 64)}
    write(user, rows)
    for tokens, served in ((0, 4), (4, 4), (5, 16), (16, 16), (17, 64), (64, 64), (100_000, 64)):
        found = find(tokens)
        assert found.config["up"]["GROUP_SIZE_M"] == served
        assert f" at {served} tokens" in found.source
        assert (f", nearest tuned count to {tokens}" in found.source) == (served != tokens)


def test_the_packages_rows_for_few_tokens_are_no_guide_to_many():
    shape = (128, 2048, 768, 8, "nvfp4", "bf16", 0)
    near = find_config(Problem(250, *shape), "NVIDIA H200", 232448)
    assert "at 128 tokens, nearest tuned count to 250" in near.source
    far = find_config(Problem(4096, *shape), "NVIDIA H200", 232448)
    assert far.config is None
    assert "ends at 128 tokens, too few to tell about 4096" in far.source


def test_layouts_for_few_rows_never_serve_more(user):
    write(user, {"2": both(TOKEN), "8": both(INLINE)})
    assert find(2).config == both(TOKEN)
    assert find(1).config == both(TOKEN)
    assert find(3).config == both(INLINE)
    assert find(512).config == both(INLINE)
    found = find(513)
    assert found.config is None
    assert "row 8: its inline layout is for up to 1024 routed rows, not 1026" in found.source
    write(user, {"2": both(TOKEN)})
    assert find(3).config is None
    assert "row 2: its token layout is for up to 2 tokens, not 3" in find(3).source


BAD = {
    "num_warps 3": ({**SORTED, "num_warps": 3}, "num_warps must be a power of two from 1 to 16, not 3"),
    "missing key": (
        {key: value for key, value in SORTED.items() if key != "num_stages"},
        "num_stages is missing",
    ),
    "tile 0": ({**SORTED, "BLOCK_SIZE_K": 0}, "BLOCK_SIZE_K must be a power of two from 16 to 2048, not 0"),
    "too large": (
        {**SORTED, "BLOCK_SIZE_K": 2048, "BLOCK_SIZE_N": 256},
        "its tiles need 4,325,376 bytes of shared memory and a block may take 232,448",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_an_impossible_row_is_named_and_not_launched(user, bad):
    row, fault = BAD[bad]
    write(user, {"8": both(row)})
    found = find()
    assert found.config is None
    assert found.source == (
        "No tuned row for E=4, D=128, F=96, K=2, bf16 on NVIDIA H200; not used: "
        f"{user / NAME}_modes.json: row 8: up: {fault}."
    )
    write(user, {"8": both(row), "16": both(SORTED)})
    found = find()
    assert found.config == both(SORTED)
    assert " at 16 tokens, nearest tuned count to 8: " in found.source
    assert f"row 8: up: {fault}." in found.source


def test_the_k_tile_of_block_scales_is_a_rule_of_the_row(user):
    name = f"{NAME},dtype=fp8_w8a8,block_shape=[128,128].json"  # vLLM's spelling, and a tile that is legal there
    write(user, {"8": {**SORTED, "BLOCK_SIZE_K": 256}, "16": {**SORTED, "BLOCK_SIZE_K": 128}}, name)
    found = find(quant="fp8_block")
    assert found.config["up"]["BLOCK_SIZE_K"] == 128
    assert f"{name}: row 8: up: BLOCK_SIZE_K must be 64 or 128 for fp8_block" in found.source


def test_a_file_for_another_device_is_named_and_not_launched(user):
    other = "E=4,N=96,device_name=NVIDIA_H100_80GB_HBM3"
    write(user, {"8": SORTED}, f"{other}.json")
    found = find()
    assert found.config is None
    assert f"not used: {user / other}.json is for NVIDIA_H100_80GB_HBM3, not for NVIDIA_H200." in found.source
    assert find(device="NVIDIA H100 80GB HBM3").config is not None
    write(user, {"8": both(SORTED)})
    assert find().config == both(SORTED)
    assert "not used: " in find().source


def test_another_shape_or_format_is_no_match(user):
    write(user, {"8": SORTED}, "E=4,N=192,device_name=NVIDIA_H200.json")
    write(user, {"8": SORTED}, f"{NAME},dtype=fp8_w8a8.json")
    assert find().config is None
    assert find(quant="fp8_channel").config is None
    assert find(quant="fp8_tensor").config is not None


def test_a_file_of_another_triton_is_stale_in_a_users_folder(user):
    write(user / "triton_3_4_0", {"8": both(SORTED)})
    found = find()
    assert found.config is None
    assert "_modes.json is stale: tuned with triton 3.4.0, running 3.6.0." in found.source
    write(user, {"triton_version": "3.4.1", "8": SORTED}, f"{NAME}.json")  # newer files of vLLM say it themselves
    assert find().config is None
    assert "is stale: tuned with triton 3.4.1, running 3.6.0" in find().source
    write(user / "triton_3_6_1", {"8": both(INLINE)})
    assert find().config == both(INLINE)


def test_the_version_that_runs_comes_first(user):
    write(user / "triton_3_6_1", {"8": both(INLINE)})
    write(user / "triton_3_6_0", {"8": both(SORTED)})
    write(user, {"8": both(TOKEN)})
    assert find().config == both(SORTED)


def test_a_packaged_row_of_another_triton_is_used_and_said_so(monkeypatch):
    mixtral = Problem(8, 8, 4096, 14336, 2, "bf16")
    here = find_config(mixtral, "NVIDIA H200", H200)
    assert "triton 3." not in here.source
    monkeypatch.setattr(lookup, "running_triton", lambda: "3.9.1")
    monkeypatch.setattr(lookup, "_answers", {})
    found = find_config(mixtral, "NVIDIA H200", H200)
    assert found.config == here.config
    assert ", tuned with triton 3.6.0, running 3.9.1: packaged triton_3_6_0/E=8,N=14336," in found.source
    foreign = find_config(mixtral, "NVIDIA H100", H200)
    assert foreign.config is None
    assert "is for NVIDIA_H200, not for NVIDIA_H100" in foreign.source


def test_a_users_folder_wins_over_the_packaged(user):
    mixtral = Problem(8, 8, 4096, 14336, 2, "bf16")
    assert "packaged" in find_config(mixtral, "NVIDIA H200", H200).source
    write(user, {"4096": both(SORTED)}, "E=8,N=14336,device_name=NVIDIA_H200_modes.json")
    found = find_config(mixtral, "NVIDIA H200", H200)
    assert found.config == both(SORTED)
    assert "packaged" not in found.source


def test_added_folders_come_before_the_environments(user, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    write(user, {"8": both(SORTED)})
    write(one, {"8": both(INLINE)})
    write(two, {"8": both({**INLINE, "num_stages": 4})})
    add_config_folder(one)
    add_config_folder(str(two))
    add_config_folder(one)
    assert config_folders() == (one, two, user)
    assert find().config == both(INLINE)
    remove_config_folder(one)
    assert find().config["up"]["num_stages"] == 4
    remove_config_folder(two)
    assert find().config == both(SORTED)
    with pytest.raises(ValueError, match=r"^folder must be one that was added \(none\); got "):
        remove_config_folder(one)
    with pytest.raises(ValueError, match=r"^folder must be an existing folder; got "):
        add_config_folder(tmp_path / "none")


def test_several_folders_of_the_environment(tmp_path, monkeypatch):
    first, second = tmp_path / "a", tmp_path / "b"
    write(second, {"8": both(SORTED)})
    monkeypatch.setenv("MOE_WORKBENCH_CONFIG_DIR", f"{first}{os.pathsep}{second}")
    found = find()
    assert found.config == both(SORTED)
    assert f"{first}: there is no such folder." in found.source
    write(first, {"8": both(INLINE)})
    assert find().config == both(INLINE)


def test_changed_files_are_read_again(user):
    write(user, {"8": both(SORTED)})
    first = find()
    assert find() == first
    write(user, {"8": both(INLINE)})
    assert find().config == both(INLINE)
    (user / f"{NAME}_modes.json").unlink()
    assert find().config is None
    write(user / "triton_3_6_0", {"8": both(SORTED)})
    assert find().config == both(SORTED)


def test_an_answer_is_kept_once_files_have_settled(user):
    write(user, {"8": both(SORTED)})
    long_ago = 1_700_000_000
    for path in (user, *user.iterdir()):
        os.utime(path, (long_ago, long_ago))
    assert find() is find()


def test_a_pair_of_sglangs_files(user):
    down = {**SORTED, "BLOCK_SIZE_N": 128, "USE_TMA": True}
    write(user, {"8": SORTED, "64": {**SORTED, "BLOCK_SIZE_M": 32}}, f"{NAME}.json")
    write(user, {"8": down}, f"{NAME}_down.json")
    found = find()
    assert found.config["up"] == {**SORTED, "BLOCK_SIZE_N": 32}
    assert found.config["down"] == down
    alone = find(64)  # the other file has no such row: the first one's serves both
    assert alone.config["down"] == {**SORTED, "BLOCK_SIZE_M": 32}
    write(user, {"8": {**down, "BLOCK_SIZE_M": 64}}, f"{NAME}_down.json")
    found = find()
    assert f"{NAME}.json with {NAME}_down.json: row 8: up and down must share BLOCK_SIZE_M" in found.source
    write(user, {"8": both(INLINE)})  # whole configurations come first
    assert find().config == both(INLINE)


def test_keys_that_mean_nothing_here_are_said_to_be_left_out(user):
    write(user, {"8": {**SORTED, "waves_per_eu": 2, "kpack": 1}}, f"{NAME}.json")
    assert ", without its waves_per_eu, kpack: " in find().source
    assert set(find().config["up"]) == set(SORTED)


def test_int4_by_group(user):
    write(user, {"8": SORTED}, f"{NAME},dtype=int4_w4a16,block_shape=[0, 64].json")
    assert find(quant="int4", group_size=64).config is not None
    assert find(quant="int4", group_size=128).config is None
    write(user, {"8": SORTED}, f"{NAME},dtype=int4_w4a16.json")
    assert find(quant="int4", group_size=128).config is not None


def test_another_hidden_size_is_said(user):
    write(user, {"8": both(SORTED, hidden_size=256, top_k=2, us=12.5)})
    found = find()
    assert found.config == both(SORTED)
    assert " at 8 tokens, with hidden_size 256 instead of 128: " in found.source


def test_long_lists_are_cut(user):
    for device in ("A", "B", "C", "D", "E"):
        write(user, {"8": SORTED}, f"E=4,N=96,device_name={device}.json")
    assert find().source.endswith(
        f"; {user / 'E=4,N=96,device_name=C'}.json is for C, not for NVIDIA_H200; and 2 more."
    )


PACKAGED_FILES = sorted(PACKAGED.glob("triton_*/*.json"))


def test_there_are_packaged_files():
    assert len(PACKAGED_FILES) >= 15


@pytest.mark.parametrize("path", PACKAGED_FILES, ids=lambda path: path.name)
def test_packaged_rows_can_be_launched(path):
    from workbench.tune.check import check_path

    name = parse_name(path.name)
    assert name is not None
    assert path.parent.name.startswith("triton_")
    states = check_path(path)
    assert states
    assert [state.fault for state in states if state.fault] == []
    if name.part == "_modes":
        for row in json.loads(path.read_text(encoding="utf-8")).values():
            flatten_config({key: row[key] for key in ("up", "down", "PDL")})
    else:  # SGLang reads every key of the file with int()
        rows = json.loads(path.read_text(encoding="utf-8"))
        assert [int(key) for key in rows] == sorted(int(key) for key in rows)
        allowed = {*SORTED, "USE_TMA"} if name.part == "_down" else set(SORTED)
        assert all(set(row) == allowed for row in rows.values())


def test_nothing_heavy_is_loaded():
    import subprocess
    import sys

    code = "import sys, moe_kernels.tuning; print([m for m in ('torch', 'triton') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
