"""Models by name: files from a hub on loopback, through the real huggingface_hub library and its cache."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from gguf_families import write_family
from hub_server import TOKEN, Hub, hub_on_loopback
from ray_clusters import ray_with_cpus
from reference_models import Reference
from server_process import serving
from tiny_model import save_tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from moeserve import LLM, CheckpointError, SamplingParams, SettingsError, cli
from moeserve.config.hub_name import parse_hub_name
from moeserve.models.checkpoint import hub_headers
from moeserve.models.checkpoint.model_files import find_model, find_tokenizer, on_this_host
from moeserve.models.checkpoint.upcycle import upcycle
from moeserve.models.inspection import inspect
from moeserve.models.registry import describe

NAME = "org/tiny-moe"
# What a repository may hold beside the files that are needed.
OTHERS = (
    "pytorch_model.bin",
    "modeling_tiny.py",
    "README.md",
    "model.onnx",
    "consolidated.safetensors",
    "original/consolidated.00.pth",
    "original/tokenizer.model",
    "runs/events.json",
)
NEEDED = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]

PUBLIC_ENDPOINT = huggingface_hub.constants.ENDPOINT


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, whose config names code, among files that are not needed."""
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_tiny.Tiny"}
    (folder / "config.json").write_text(json.dumps(config))
    for name in OTHERS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not needed")
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> Iterator[Hub]:
    """The only hub, which has the model. The library reads its variables at import, so its constants are set too."""
    with hub_on_loopback() as hub:
        home = tmp_path / "home"
        home.mkdir()
        monkeypatch.chdir(home)
        for name, value in hub.environment(home).items():
            monkeypatch.setenv(name, value)
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        template = huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE
        template = template.replace(PUBLIC_ENDPOINT, hub.url)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(home / "hf" / "hub"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(home / "hf" / "token"))
        hub.add(NAME, model)
        yield hub


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def copied(folder: Path, to: Path, *left_out: str) -> Path:
    return Path(shutil.copytree(folder, to, ignore=shutil.ignore_patterns(*left_out)))


def snapshot_of(hub: Hub, name: str = NAME, number: int = -1) -> str:
    return list(hub.repositories[name].commits)[number]


def test_an_llm_fetches_what_it_needs_and_answers_like_the_folder(hub: Hub, model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(str(model)) as llm:
        expected = llm.generate("a b", params)[0].outputs[0].token_ids
    with LLM(NAME) as llm:
        assert llm.generate("a b", params)[0].outputs[0].token_ids == expected
    assert hub.fetched() == NEEDED
    hub.requests.clear()
    with LLM(NAME) as llm:
        assert llm.generate("a b", params)[0].outputs[0].token_ids == expected
    assert [each for each in hub.requests if "/org/" in each] == [f"GET /api/models/{NAME}/revision/main"]
    # Outside the two caches, nothing is written.
    assert {path.name for path in Path.cwd().iterdir()} <= {"cache", "hf"}


def test_the_cache_suffices_without_a_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = find_model(NAME).fetch()
    hub.requests.clear()
    go_offline(monkeypatch)
    assert find_model(NAME).fetch() == folder
    assert hub.requests == []
    with LLM(NAME) as llm:
        assert llm.config.weights.model_path == str(folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    assert find_model(NAME).fetch() == folder
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    hub.failure = 503
    assert find_model(NAME).fetch() == folder


def test_a_cache_of_the_library_itself_is_used(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the library knows that the snapshot lacks files, here a README and a tokenizer's config."""
    patterns = ["config.json", "*.safetensors", "tokenizer.json"]
    folder = huggingface_hub.snapshot_download(NAME, endpoint=hub.url, allow_patterns=patterns)
    go_offline(monkeypatch)
    assert find_model(NAME).fetch() == Path(folder)


@pytest.mark.parametrize("has_index", [True, False])
def test_shards_are_those_of_the_index(hub: Hub, plain: Reference, tmp_path: Path, has_index: bool) -> None:
    folder = tmp_path / "sharded"
    plain.model.save_pretrained(folder, max_shard_size="40KB")
    shards = sorted(path.name for path in folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    shutil.copy(folder / shards[0], folder / "consolidated.safetensors")
    if not has_index:
        (folder / "model.safetensors.index.json").unlink()
    hub.add("org/sharded", folder)
    fetched = find_model("org/sharded").fetch()
    assert sorted(path.name for path in fetched.glob("*.safetensors")) == shards
    assert {*hub.fetched()} >= {*shards}
    assert inspect(fetched, None).stored == inspect(find_model("org/sharded").describe(), None).stored


def test_inspect_reads_headers_alone(hub: Hub, model: Path) -> None:
    found = inspect(find_model(NAME).describe(with_headers=True), None)
    whole = inspect(model, None)
    assert dataclasses.replace(found, model="", free_bytes=0) == dataclasses.replace(whole, model="", free_bytes=0)
    of_weights = [each for each in hub.requests if each.startswith("GET") and "model.safetensors" in each]
    assert of_weights
    assert all("bytes=0-131071" in each for each in of_weights)
    hub.requests.clear()
    assert inspect(find_model(NAME).describe(with_headers=True), None).stored == whole.stored
    assert hub.fetched() == []
    # A start after that fetches the weights.
    assert (find_model(NAME).fetch() / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_a_dense_model_is_refused_before_its_weights_are_fetched(hub: Hub, model: Path, tmp_path: Path) -> None:
    folder = copied(model, tmp_path / "dense")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    hub.add("org/dense", folder)
    with pytest.raises(CheckpointError, match="LlamaForCausalLM"):
        LLM("org/dense")
    assert not any("model.safetensors" in each for each in hub.requests if "resolve" in each)


def test_code_is_refused(hub: Hub) -> None:
    with pytest.raises(SettingsError, match="trust_remote_code=True"):
        LLM(NAME, trust_remote_code=True)
    assert hub.requests == []


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def with_gguf_alone(folder: Path) -> None:
    without_config(folder)
    without_weights(folder)
    (folder / "tiny-Q8_0.gguf").write_bytes(b"GGUF")


def with_incomplete_index(folder: Path) -> None:
    without_weights(folder)
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "mentioned"),
    [
        (without_weights, "pytorch_model.bin"),
        (without_config, "config.json"),
        (with_gguf_alone, "org/broken:FILE.*tiny-Q8_0.gguf"),
        (with_incomplete_index, "model-00001-of-00002.safetensors"),
    ],
)
def test_repositories_without_a_checkpoint(
    hub: Hub, model: Path, tmp_path: Path, damage: Callable[[Path], None], mentioned: str
) -> None:
    folder = copied(model, tmp_path / "broken")
    damage(folder)
    hub.add("org/broken", folder)
    with pytest.raises(CheckpointError, match=f"org/broken.*{mentioned}"):
        find_model("org/broken").fetch()


@pytest.mark.parametrize(
    ("name", "settings", "variables", "mentioned"),
    [
        ("org/missing", {}, {}, ["org/missing", "neither a folder"]),
        (NAME, {"revision": "v9"}, {}, [NAME, "'v9'"]),
        ("org/private", {}, {}, ["org/private", "HF_TOKEN"]),
        ("org/gated", {}, {}, ["org/gated", "gated", "login", "HF_TOKEN"]),
        (NAME, {}, {"HF_TOKEN": "hf_wrong"}, [NAME, "401", "HF_TOKEN"]),
        ("org/double--hyphen", {}, {}, ["org/double--hyphen"]),
    ],
)
def test_refusals_are_named(
    hub: Hub,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    settings: dict[str, str],
    variables: dict[str, str],
    mentioned: list[str],
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    for access in ("private", "gated"):
        hub.add(f"org/{access}", model, access=access)
    with pytest.raises(CheckpointError) as caught:
        find_model(name, **settings)
    assert all(each in str(caught.value) for each in mentioned), caught.value


@pytest.mark.parametrize("access", ["private", "gated"])
def test_tokens_of_the_environment_and_of_the_login_open_repositories(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch, access: str
) -> None:
    hub.add(f"org/{access}", model, access=access)
    with monkeypatch.context() as patch:
        patch.setenv("HF_TOKEN", TOKEN)
        assert find_model(f"org/{access}").describe().is_dir()
    login = Path(huggingface_hub.constants.HF_TOKEN_PATH)
    login.parent.mkdir(exist_ok=True)
    login.write_text(TOKEN)
    assert (find_model(f"org/{access}").fetch() / "model.safetensors").is_file()
    assert not hub.has_leaked_token


def test_offline_without_a_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    go_offline(monkeypatch)
    with pytest.raises(CheckpointError, match=rf"{NAME}.*cache.*HF_HUB_OFFLINE=1"):
        LLM(NAME)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match=rf"{NAME}.*http://127.0.0.1:9"):
        LLM(NAME)


def test_offline_with_a_part_in_the_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    find_model(NAME).describe()
    go_offline(monkeypatch)
    with pytest.raises(CheckpointError, match=rf"{NAME}.*cache.*HF_HUB_OFFLINE=1"):
        LLM(NAME)


def test_revisions(hub: Hub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = snapshot_of(hub)
    newer = copied(model, tmp_path / "newer")
    (newer / "generation_config.json").write_text('{"temperature": 0.5}')
    second = hub.add(NAME, newer)
    hub.repositories[NAME].names = {"v1.0": first, "refs/pr/2": second}
    commits = {"v1.0": first, first: first, "refs/pr/2": second, None: second, "main": second}
    for revision, commit in commits.items():
        assert find_model(NAME, revision=revision).fetch().name == commit
    with LLM(NAME, revision="v1.0") as llm:
        assert llm.get_default_sampling_params().temperature != 0.5
        assert llm.config.weights.hub_model is not None
        assert llm.config.weights.hub_model.revision == first
    third = hub.add(NAME, copied(model, tmp_path / "third"))
    assert find_model(NAME).fetch().name == third  # the main branch has moved
    go_offline(monkeypatch)
    for revision, commit in {**commits, None: third, "main": third}.items():
        assert find_model(NAME, revision=revision).fetch().name == commit


def test_download_dir(hub: Hub, tmp_path: Path) -> None:
    folder = find_model(NAME, download_dir=str(tmp_path / "elsewhere")).fetch()
    assert folder.is_relative_to(tmp_path / "elsewhere")
    assert not Path(huggingface_hub.constants.HF_HUB_CACHE).exists()


def test_a_cut_transfer_is_completed(hub: Hub, model: Path) -> None:
    files = find_model(NAME)
    hub.bytes_until_cut = 100_000
    assert (files.fetch() / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert hub.bytes_until_cut is None


def test_a_later_start_fetches_only_what_an_interrupted_one_lacks(hub: Hub, plain: Reference, tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    plain.model.save_pretrained(folder, max_shard_size="40KB")
    hub.add("org/sharded", folder)
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    huggingface_hub.hf_hub_download("org/sharded", shards[0], endpoint=hub.url)
    hub.requests.clear()
    description = find_model("org/sharded").describe()
    assert describe(description).model == describe(folder).model
    assert not any(name in hub.fetched() for name in shards)
    find_model("org/sharded").fetch()
    assert [name for name in hub.fetched() if name.endswith(".safetensors")] == shards[1:]


def test_two_processes_fetch_each_file_once(hub: Hub, tmp_path: Path) -> None:
    code = f"from moeserve.models.checkpoint.model_files import find_model; print(find_model({NAME!r}).fetch())"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ), stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert outputs[0] == outputs[1] != ""
    of_weights = [each for each in hub.requests if each.startswith("GET /content/") and "model.safetensors" in each]
    assert len(of_weights) == 1


def test_a_full_disk_is_named(hub: Hub, tmp_path: Path) -> None:
    code = (
        "import resource; from moeserve.models.checkpoint.model_files import find_model\n"
        "files = find_model('org/tiny-moe')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); files.fetch()"
    )
    run = hub.run("-c", code, home=tmp_path)
    assert "CheckpointError" in run.stderr
    assert "download_dir" in run.stderr.splitlines()[-1]


def test_a_missing_library_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SettingsError, match=rf"{NAME}.*pip install 'moeserve\[hub\]'"):
        LLM(NAME)


def test_folders_take_precedence_and_paths_are_never_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("./org/model", "/org/model", "~/model", "../org/model", "model", "a/b/c", "org/", "org/x.gguf", "-/-"):
        assert parse_hub_name(name) is None, name
    for name in ("org/model", "Qwen/Qwen3-30B-A3B", "org/model.v2", "1org/2_model"):
        assert parse_hub_name(name) is not None, name
    found = parse_hub_name("org/model-GGUF:sub/x-Q4_K_M.gguf")
    assert found is not None
    assert (found.repository, found.gguf) == ("org/model-GGUF", "sub/x-Q4_K_M.gguf")
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert parse_hub_name("org/model") is None


@pytest.fixture
def ggufs(hub: Hub, plain: Reference, tmp_path: Path) -> Path:
    """A repository with a real GGUF file, and others whose names alone matter."""
    folder = tmp_path / "ggufs"
    folder.mkdir()
    write_family(plain.folder, folder / "Tiny-Q8_0.gguf")
    for name in (
        "Tiny-Q4_K_M.gguf",
        "Tiny-UD-Q4_K_M.gguf",
        "Tiny-Q4_K_S.gguf",
        "tiny-q2_k.gguf",
        "mmproj-F16.gguf",
        "BF16/Tiny-BF16-00001-of-00002.gguf",
        "BF16/Tiny-BF16-00002-of-00002.gguf",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"GGUF {name}")
    hub.add("org/tiny-GGUF", folder)
    return folder


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("Tiny-Q8_0.gguf", ["Tiny-Q8_0.gguf"]),
        ("Tiny-Q8_0", ["Tiny-Q8_0.gguf"]),
        ("Q8_0", ["Tiny-Q8_0.gguf"]),
        ("Q2_K", ["tiny-q2_k.gguf"]),
        ("q4_k_s", ["Tiny-Q4_K_S.gguf"]),
        ("UD-Q4_K_M", ["Tiny-UD-Q4_K_M.gguf"]),
        ("BF16", ["BF16/Tiny-BF16-00001-of-00002.gguf", "BF16/Tiny-BF16-00002-of-00002.gguf"]),
        ("Tiny-BF16-00002-of-00002.gguf", ["BF16/Tiny-BF16-00001-of-00002.gguf", "BF16/Tiny-BF16-00002-of-00002.gguf"]),
        ("Q4_K_M", r"Tiny-Q4_K_M.gguf, Tiny-UD-Q4_K_M.gguf"),
        ("Q4_K", "Tiny-Q4_K_M.gguf"),
        ("F16", "org/tiny-GGUF"),
        ("Q6_K", "org/tiny-GGUF"),
    ],
)
def test_gguf_files_are_chosen_by_name(hub: Hub, ggufs: Path, wanted: str, expected: list[str] | str) -> None:
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=f"{wanted}.*{expected}|{expected}.*{wanted}"):
            find_model(f"org/tiny-GGUF:{wanted}")
        return
    path = find_model(f"org/tiny-GGUF:{wanted}").fetch()
    assert str(path).endswith(expected[0])
    assert hub.fetched() == expected


def test_a_gguf_file_is_described_by_its_header(hub: Hub, ggufs: Path) -> None:
    """Beyond its header, the description has holes."""
    (ggufs / "Tiny-Q8_0.gguf").open("ab").truncate(2**26)  # larger than what is read of it
    found = describe(find_model("org/tiny-GGUF:Q8_0").describe())
    assert found.model == describe(ggufs / "Tiny-Q8_0.gguf").model
    of_file = [each for each in hub.requests if each.startswith("GET") and "Q8_0" in each]
    assert of_file
    assert all(each.endswith(f"bytes=0-{2**24 - 1}") for each in of_file)


def test_factors_of_positions_are_fetched_with_a_gguf_header(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference_named: Callable[[str], Reference]
) -> None:
    monkeypatch.setattr(hub_headers, "FIRST_GGUF_BYTES", 2**12)  # less than this file's header
    (tmp_path / "phi").mkdir()
    path = write_family(reference_named("phimoe").folder, tmp_path / "phi" / "Phi-F32.gguf")
    hub.add("org/phi", path.parent)
    found = find_model("org/phi:F32").describe()
    assert describe(found).model == describe(path).model
    assert found.stat().st_blocks * 512 < path.stat().st_size


def test_a_tokenizer_has_a_name_and_a_revision_of_its_own(hub: Hub, model: Path, plain: Reference) -> None:
    hub.add("org/plain", plain.folder)
    with LLM("org/plain", tokenizer=NAME, load_format="dummy") as llm:
        assert llm.codec is not None
        assert llm.config.texts.tokenizer_path.endswith(snapshot_of(hub))
    assert not any(name.endswith(".safetensors") for name in hub.fetched())
    hub.repositories[NAME].names = {"old": snapshot_of(hub)}
    assert find_tokenizer(NAME, revision="old")[0].name == snapshot_of(hub)


def test_hosts_of_a_cluster_have_caches_of_their_own_and_one_commit(
    hub: Hub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = snapshot_of(hub)
    with LLM(NAME) as llm:
        config = llm.config
    hub.add(NAME, copied(model, tmp_path / "newer"))  # meanwhile, the main branch moves
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "other host"))
    there = on_this_host(config)
    assert Path(there.weights.model_path).is_relative_to(tmp_path / "other host")
    assert Path(there.weights.model_path).name == first
    assert there.texts.tokenizer_path == there.weights.model_path
    hub.requests.clear()
    assert on_this_host(config, only_cached=True) == there
    assert hub.requests == []
    own = config.changed(weights={"hub_model": None})
    assert on_this_host(own) == own


@pytest.mark.slow
def test_ranks_in_a_ray_cluster_read_what_the_driver_has_fetched(hub: Hub, model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(str(model)) as llm:
        expected = llm.generate("a b", params)[0].outputs[0].token_ids
    find_model(NAME).fetch()
    hub.requests.clear()
    with ray_with_cpus(2), LLM(NAME, executor="ray", tensor_parallel_size=2, num_threads=1) as llm:
        assert llm.generate("a b", params)[0].outputs[0].token_ids == expected
    assert [each for each in hub.requests if "/org/" in each] == [f"GET /api/models/{NAME}/revision/main"]


def test_upcycling_a_model_of_a_hub(hub: Hub, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    hub.add("org/llama", tmp_path / "dense")
    upcycle("org/llama", tmp_path / "by name", show_progress=False)
    upcycle(tmp_path / "dense", tmp_path / "by folder", show_progress=False)
    shards = [next((tmp_path / name).glob("*.safetensors")).read_bytes() for name in ("by name", "by folder")]
    assert shards[0] == shards[1]
    hub.requests.clear()
    with pytest.raises(CheckpointError, match="MixtralForCausalLM"):
        upcycle(NAME, tmp_path / "refused", show_progress=False)
    assert not any(each.startswith("HEAD") and "model.safetensors" in each for each in hub.requests)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["inspect", "plan", "simulate"])
def test_commands_without_weights(hub: Hub, tmp_path: Path, command: str) -> None:
    flags: dict[str, list[str]] = {"plan": ["--ranks", "1"], "simulate": ["--ranks", "1", "--hardware", "h100"]}
    arguments = ["-m", "moeserve", command, NAME, *flags.get(command, []), "--json"]
    run = hub.run(*arguments, home=tmp_path, HF_HUB_CACHE="cache of hub")
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    if command != "simulate":
        assert json.loads(run.stdout)["model"] == NAME
    assert not any("model.safetensors" in each and "bytes=" not in each for each in hub.requests if "GET" in each)
    assert (tmp_path / "cache of hub").is_dir()


def test_inspect_says_where_the_weights_are(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    for place, absent in (("in the hub", "on disk"), ("on disk", "in the hub")):
        assert cli.main(["inspect", NAME]) == 0
        text = capsys.readouterr().out
        assert place in text
        assert absent not in text
        find_model(NAME).fetch()


@pytest.mark.slow
def test_generate_writes_a_line_of_log_and_no_bars(hub: Hub, tmp_path: Path) -> None:
    flags = ["generate", NAME, "--prompt", "a", "--max-tokens", "2", "--revision", "main"]
    run = hub.run("-m", "moeserve", "--verbose", *flags, home=tmp_path)
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stderr.splitlines() if "fetching" in line]
    assert len(lines) == 1
    assert "KiB" in lines[0]
    assert NAME in lines[0]
    assert "%|" not in run.stderr
    run = hub.run("-m", "moeserve", *flags, home=tmp_path, HF_HUB_OFFLINE="1")
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""


@pytest.mark.slow
def test_a_server_names_the_model_as_it_was_given(hub: Hub) -> None:
    with (
        serving("--model", NAME, "--device", "cpu") as server,
        urllib.request.urlopen(f"{server.url}/v1/models") as answer,
    ):
        assert [each["id"] for each in json.load(answer)["data"]] == [NAME]


@pytest.mark.slow
def test_a_server_makes_the_requests_of_one_start(hub: Hub, tmp_path: Path) -> None:
    def of_model() -> list[str]:
        return sorted(each for each in hub.requests if NAME in each)

    with serving("--model", NAME, "--device", "cpu", "--download-dir", str(tmp_path / "of server")):
        of_server = of_model()
    hub.requests.clear()
    with LLM(NAME, download_dir=str(tmp_path / "of library")):
        assert of_model() == of_server != []
