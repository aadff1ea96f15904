"""A trainer's update gives the weights of a fresh load in every layout. A broken one leaves old, new or stale ones."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import living_ranks
from reference_models import Reference
from safetensors.torch import load_file, save_file
from test_draft_layers import MTP, with_modules
from torch import Tensor

from moeserve import (
    LLM,
    AsyncLLM,
    EngineError,
    RequestError,
    SamplingParams,
    ScaleError,
    SettingsError,
    StaleWeightsError,
    WeightUpdateError,
)
from moeserve.controls import PauseMode, WeightState
from moeserve.models.checkpoint import packed_cache_writer
from moeserve.models.weight_update import CHUNK_PREFIX, SHARED_MEMORY
from moeserve.outputs import WeightSpan
from moeserve.rl import WeightSender
from moeserve.worker.weight_sources import packed_entry

SETTINGS: dict[str, Any] = dict(max_model_len=64, kv_cache_memory="8MiB", num_threads=1, show_progress=False)
PROMPTS = [[5, 7], [*range(1, 40)], [3, 1, 4, 1, 5, 9]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp": dict(tensor_parallel_size=2),
    "dp": dict(data_parallel_size=2, num_redundant_experts=2),
    "pp": dict(pipeline_parallel_size=2),
    "tpdp": dict(tensor_parallel_size=2, data_parallel_size=2),
    "tppp": dict(tensor_parallel_size=2, pipeline_parallel_size=2),
    "dppp": dict(data_parallel_size=2, pipeline_parallel_size=2, num_redundant_experts=2),
    "all": dict(tensor_parallel_size=2, data_parallel_size=2, pipeline_parallel_size=2, num_redundant_experts=1),
}
FORMS: dict[str, dict[str, Any]] = {
    "bf16": dict(dtype="bfloat16"),
    "int8": dict(dtype="bfloat16", quantization="int8"),
    "int4": dict(dtype="bfloat16", quantization="int4"),
}


@dataclass(frozen=True)
class Trained:
    """A checkpoint, and the same model after training."""

    old: Path
    new: Path
    tensors: dict[str, Tensor]  # of the new model, as transformers names and stacks them


@pytest.fixture(scope="module")
def trained_named(
    reference_named: Callable[[str], Reference], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Trained]:
    made: dict[str, Trained] = {}

    def named(name: str) -> Trained:
        if name not in made:
            reference = reference_named(name)
            model = copy.deepcopy(reference.model)
            generator = torch.Generator().manual_seed(7)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.3 * parameter.std(correction=0) * torch.randn(parameter.shape, generator=generator)
            folder = tmp_path_factory.mktemp(f"{name}-trained")
            model.save_pretrained(folder)
            made[name] = Trained(reference.folder, folder, dict(model.state_dict()))
        return made[name]

    return named


@pytest.fixture
def trained(trained_named: Callable[[str], Trained]) -> Trained:
    return trained_named("qwen3-moe")


@pytest.fixture
def llm(trained: Trained) -> Iterator[LLM]:
    with LLM(str(trained.old), rl=True, **SETTINGS) as llm:
        yield llm


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def fresh(trained: Trained, folder: Path, **options: Any) -> tuple[dict[str, str], list[list[int]]]:
    """Return the checksums and the tokens of an engine that loads a checkpoint."""
    with LLM(str(folder), rl=True, **SETTINGS, **options) as llm:
        return llm.weight_checksums(), tokens(llm)


@pytest.mark.ranks
@pytest.mark.slow_but(
    "qwen3-moe-one-int4", "deepseek-v3-four-heads-one-bf16", "qwen3-moe-tpdp-int8", "qwen3-moe-pp-bf16"
)
@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3-four-heads", "qwen3-next", "mixtral"])
def test_panels_and_tokens_are_those_of_a_fresh_load(
    name: str, layout: str, form: str, trained_named: Callable[[str], Trained]
) -> None:
    trained, options = trained_named(name), LAYOUTS[layout] | FORMS[form]
    expected, expected_tokens = fresh(trained, trained.new, **options)
    with LLM(str(trained.old), rl=True, **SETTINGS, **options) as llm:
        old, old_tokens = llm.weight_checksums(), tokens(llm)
        assert old_tokens != expected_tokens
        tokens(llm)  # steps are captured now
        WeightSender(llm, "shm", chunk_bytes=10_000).send(trained.tensors, "one")
        assert llm.weight_checksums() == expected
        assert tokens(llm) == expected_tokens
        llm.reload_weights()
        assert llm.weight_checksums() == old
        assert tokens(llm) == old_tokens
        llm.start_weight_update()
        llm.update_weights({"update_info": {"path": str(trained.new)}})
        llm.finish_weight_update()
        assert llm.weight_checksums() == expected
        assert tokens(llm) == expected_tokens
        llm.reload_weights()
        WeightSender(llm, "tcp", chunk_bytes=50_000).send(trained.tensors, "two")
        assert llm.weight_checksums() == expected
        assert tokens(llm) == expected_tokens
    assert not list(SHARED_MEMORY.glob(f"{CHUNK_PREFIX}{os.getpid()}-*"))


@pytest.mark.ranks
@pytest.mark.slow
def test_experts_that_were_moved_get_the_new_weights(trained: Trained) -> None:
    options: dict[str, Any] = dict(data_parallel_size=2, num_redundant_experts=2, enable_prefix_caching=False)
    moving: dict[str, Any] = dict(rebalance="auto", rebalance_horizon=10**9, expert_load_window=3)
    _, expected = fresh(trained, trained.new, **options)
    with LLM(str(trained.old), rl=True, **SETTINGS, **options, **moving) as llm:
        for number, transport in enumerate(("shm", "disk", "tcp"), start=1):
            for _ in range(8):
                tokens(llm)
            assert llm.expert_load().placement_epoch > 0
            WeightSender(llm, transport).send(trained.tensors, str(number))  # type: ignore[arg-type]
            sent = llm.weight_checksums()
            assert tokens(llm) == expected
            for _ in range(8):  # they move on, with copies of the new weights
                tokens(llm)
            moved = llm.weight_checksums()
            WeightSender(llm, transport).send(trained.tensors, "again")  # type: ignore[arg-type]
            assert llm.weight_checksums() == moved
            assert number > 1 or sent != llm.weight_checksums(), "no expert has moved"


@pytest.mark.parametrize("mode", ["keep", "retract", "abort"])
def test_outputs_name_the_versions_of_their_tokens(trained: Trained, mode: PauseMode) -> None:
    """After `retract`, tokens are those that a fresh engine of the new weights adds to the same tokens."""
    prompt, most = [*range(2, 30)], 30

    async def run() -> list[Any]:
        llm = AsyncLLM(str(trained.old), rl=True, **SETTINGS)
        outputs: list[Any] = []
        try:
            params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
            async for output in llm.generate(prompt, params):
                if not outputs:
                    await llm.pause(mode)
                    await llm.start_weight_update()
                    await llm.update_weights({"update_info": {"path": str(trained.new)}})
                    await llm.finish_weight_update("next")
                    await llm.resume()
                outputs.append(output.outputs[0])
            cached = [output.num_cached_tokens async for output in llm.generate(prompt, params)]
            assert cached[-1] == (0 if mode != "retract" else 16), "blocks of other weights are found"
        finally:
            llm.shutdown()
        return outputs

    last = asyncio.run(run())[-1]
    num_old = last.weight_versions[0].stop
    if mode == "abort":
        assert last.finish_reason == "abort"
        assert last.weight_versions == (WeightSpan("default", 0, len(last.token_ids)),)
        return
    assert last.weight_versions == (WeightSpan("default", 0, num_old), WeightSpan("next", num_old, most))
    with LLM(str(trained.new), **SETTINGS) as llm:
        begun = [*prompt, *last.token_ids[:num_old]]
        params = SamplingParams(temperature=0, max_tokens=most - num_old, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": begun}], params, use_tqdm=False)
        assert (output.outputs[0].token_ids == last.token_ids[num_old:]) or mode == "keep"


def write_chunk(tensors: dict[str, Tensor], name: str) -> dict[str, Any]:
    path = SHARED_MEMORY / f"{CHUNK_PREFIX}{os.getpid()}-{name}"
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
    return {"update_info": {"path": str(path)}}


@pytest.fixture
def chunks(trained: Trained) -> Iterator[list[dict[str, Any]]]:
    """Return the requests of an update in four chunks."""
    names = list(trained.tensors)
    parts = [names[start::4] for start in range(4)]
    yield [write_chunk({name: trained.tensors[name] for name in part}, str(index)) for index, part in enumerate(parts)]
    for path in SHARED_MEMORY.glob(f"{CHUNK_PREFIX}{os.getpid()}-*"):
        path.unlink()


def test_a_sender_that_stops_leaves_old_new_or_stale_weights(
    trained: Trained, llm: LLM, chunks: list[dict[str, Any]]
) -> None:
    """It stops after each of its calls. The next sender has to send all."""
    shapes = {name: list(tensor.shape) for name, tensor in trained.tensors.items()}
    old = llm.weight_checksums()
    old_tokens, (new, new_tokens) = tokens(llm), fresh(trained, trained.new)
    for num_calls in range(6):
        llm.start_weight_update(shapes)
        for chunk in chunks[:num_calls]:
            llm.update_weights(chunk)
        if num_calls == 5:
            llm.finish_weight_update("new")
            assert (llm.weight_checksums(), tokens(llm)) == (new, new_tokens)
            break
        llm.start_weight_update(shapes)  # cancels the former
        if num_calls:
            with pytest.raises(WeightUpdateError, match="stale"):
                llm.finish_weight_update("none")
            for chunk in chunks:
                llm.update_weights(chunk)
            llm.finish_weight_update("new")
            assert (llm.weight_checksums(), tokens(llm)) == (new, new_tokens)
            llm.reload_weights()
        else:
            llm.finish_weight_update("same")
        assert (llm.weight_checksums(), tokens(llm)) == (old, old_tokens)


def test_wrong_tensors_are_refused_before_anything_is_copied(
    trained: Trained, llm: LLM, chunks: list[dict[str, Any]]
) -> None:
    old = llm.weight_checksums()
    name = "model.layers.0.self_attn.q_proj.weight"
    wrong: list[tuple[dict[str, Any], str]] = [
        (write_chunk({"model.layers.0.self_attn.z_proj.weight": torch.ones(3)}, "unknown"), "z_proj"),
        (write_chunk({name: torch.ones(3, 3)}, "shape"), r"\[3, 3\]"),
        (write_chunk({name: trained.tensors[name].to(torch.int32)}, "dtype"), "I32"),
        (write_chunk({name: trained.tensors[name].to(torch.int8)}, "bytes"), "I8"),
        (write_chunk({f"{name}.bias": torch.ones(3, dtype=torch.int8)}, "unused"), "I8"),
        ({"update_info": {"path": str(trained.old / "config.json")}}, "config.json"),
        ({"update_info": {"path": str(SHARED_MEMORY / f"{CHUNK_PREFIX}missing")}}, "missing"),
    ]
    with pytest.raises(WeightUpdateError, match="start_weight_update"):
        llm.update_weights(chunks[0])
    with pytest.raises(WeightUpdateError, match="start_weight_update"):
        llm.finish_weight_update()
    llm.start_weight_update({name: list(tensor.shape) for name, tensor in trained.tensors.items()})
    for request, words in wrong:
        with pytest.raises(WeightUpdateError, match=words):
            llm.update_weights(request)
    assert llm.weight_checksums() == old
    llm.update_weights(chunks[0])
    with pytest.raises(WeightUpdateError, match="sent before"):
        llm.update_weights(chunks[0])
    with pytest.raises(WeightUpdateError, match=r"partly filled.*self_attn"):
        llm.finish_weight_update()
    for chunk in chunks[1:]:
        llm.update_weights(chunk)
    llm.finish_weight_update("new")
    assert llm.weight_checksums() == fresh(trained, trained.new)[0]
    for request in ({"path": "a"}, {"update_info": {"names": []}}, {"update_info": {"path": "a", "b": 1}}):
        with pytest.raises(RequestError, match="update_info"):
            llm.update_weights(request)
    with pytest.raises(RequestError, match="nccl"):
        llm.init_weight_transfer_engine({"init_info": {"transport": "nccl"}})


@pytest.mark.parametrize(
    "shapes",
    [
        {"model.layers.0.mlp.experts.gate_up_proj": []},
        {"model.layers.0.mlp.experts.gate_up_proj": [1, 2, 3], "model.embed_tokens.weight": [0]},
        {"": [-1], "model.layers.99.mlp.experts.0.up_proj.weight": [2, 2]},
    ],
)
def test_an_engine_outlives_nonsense(
    llm: LLM, trained: Trained, chunks: list[dict[str, Any]], shapes: dict[str, list[int]]
) -> None:
    def update() -> None:
        llm.start_weight_update(shapes)
        for chunk in chunks:
            llm.update_weights(chunk)
        llm.finish_weight_update()

    old, expected = llm.weight_checksums(), tokens(llm)
    with pytest.raises(WeightUpdateError):
        update()
    llm.reload_weights()
    assert (llm.weight_checksums(), tokens(llm)) == (old, expected)


def test_a_folder_that_lacks_tensors_ends_its_update(trained: Trained, llm: LLM, tmp_path: Path) -> None:
    old, expected = llm.weight_checksums(), tokens(llm)
    with pytest.raises(WeightUpdateError, match="nowhere"):
        llm.update_weights_from_folder("/nowhere", "new")
    with pytest.raises(RequestError, match="update_info"):
        llm.update_weights_from_folder("")
    assert not llm.session.engine.weights.is_updating, "requests would wait for weight_update_timeout"
    assert (llm.weight_checksums(), tokens(llm), llm.get_weight_version()) == (old, expected, "default")
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({name: trained.tensors[name].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(WeightUpdateError, match=r"partly filled.*k_proj"):
        llm.update_weights_from_folder(str(tmp_path), "new")
    with pytest.raises(StaleWeightsError):  # one tensor was copied
        tokens(llm)
    llm.update_weights_from_folder(str(trained.new), "new")
    assert (llm.weight_checksums(), llm.get_weight_version()) == (fresh(trained, trained.new)[0], "new")


def test_weights_are_the_checkpoints_only_after_a_reload(trained: Trained, llm: LLM) -> None:
    """A trainer may give any version, also that of the checkpoint."""
    llm.update_weights_from_folder(str(trained.new), "default")
    with pytest.raises(ScaleError, match="checkpoint"):
        llm.scale(2)
    llm.reload_weights()
    assert llm.session.engine.weights == WeightState()
    llm.start_weight_update()
    llm.finish_weight_update("default")
    assert llm.session.engine.weights.differs


@pytest.mark.parametrize("wrong", [2**31 + 1, 2**70])
def test_an_update_that_ranks_could_not_read_leaves_the_engine_as_it_is(llm: LLM, wrong: int) -> None:
    expected = tokens(llm)
    with pytest.raises(RequestError, match="at most 2147483648"):
        llm.start_weight_update({"model.norm.weight": [wrong]})
    for version in (7, "\ud800"):
        with pytest.raises(RequestError, match="FinishUpdate"):
            llm.finish_weight_update(version)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="StartUpdate"):
        llm.start_weight_update({1: [3]})  # type: ignore[dict-item]
    assert not llm.session.engine.has_work
    assert tokens(llm) == expected


def test_only_some_weights_can_be_updated(trained: Trained, llm: LLM) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    old = llm.weight_checksums()
    WeightSender(llm).send({name: trained.tensors[name]})
    new = llm.weight_checksums()
    (changed,) = [key for key in old if old[key] != new[key]]
    assert ".1.0." in changed


def test_an_update_without_calls_is_cancelled_and_requests_are_refused(
    trained: Trained, chunks: list[dict[str, Any]]
) -> None:
    with LLM(str(trained.old), rl=True, weight_update_timeout=1, **SETTINGS) as llm:
        llm.start_weight_update({name: list(tensor.shape) for name, tensor in trained.tensors.items()})
        llm.update_weights(chunks[0])
        with pytest.raises(StaleWeightsError):  # it waits for the update, which ends without its last tensors
            tokens(llm)
        with pytest.raises(StaleWeightsError):
            tokens(llm)
        with pytest.raises(ScaleError):
            llm.scale(2)
        llm.reload_weights()
        assert tokens(llm) == fresh(trained, trained.old)[1]


@pytest.mark.ranks
@pytest.mark.parametrize("version", ["new", "default"])
def test_a_restart_serves_no_older_weights(trained: Trained, version: str) -> None:
    options: dict[str, Any] = dict(data_parallel_size=2, on_failure="restart")
    with LLM(str(trained.old), rl=True, **SETTINGS, **options) as llm:
        expected = tokens(llm)
        WeightSender(llm).send(trained.tensors, version)
        new_tokens = tokens(llm)
        os.utime(trained.old / "model.safetensors")  # trainers save over the checkpoint: that ends no engine
        os.kill(living_ranks()[0].pid, signal.SIGKILL)
        with pytest.raises(StaleWeightsError):
            tokens(llm)
        WeightSender(llm).send(trained.tensors, version)
        assert tokens(llm) == new_tokens
        llm.reload_weights()
        assert tokens(llm) == expected


def test_engines_that_cannot_be_updated_say_why(trained: Trained) -> None:
    with LLM(str(trained.old), **SETTINGS) as llm, pytest.raises(WeightUpdateError, match="rl"):
        llm.start_weight_update()
    for options in (dict(model_impl="transformers"), dict(kv_transfer_address="127.0.0.1")):
        with pytest.raises(SettingsError, match="rl=True"):
            LLM(str(trained.old), rl=True, **SETTINGS, **options)
    assert issubclass(StaleWeightsError, EngineError)


def test_updated_weights_neither_come_from_nor_go_to_the_packed_cache(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path))
    monkeypatch.setattr(packed_entry, "MIN_CACHED_BYTES", 0)
    monkeypatch.setattr(packed_cache_writer, "DELAY_SECONDS", 0.0)
    with LLM(str(trained.old), rl=True, **SETTINGS) as llm:
        WeightSender(llm).send(trained.tensors)
        packed_cache_writer.wait_for_cache_writers()
    assert not list((tmp_path / "packed").glob("*"))
    with LLM(str(trained.old), **SETTINGS) as llm:
        expected = tokens(llm)
        packed_cache_writer.wait_for_cache_writers()
    (entry,) = (tmp_path / "packed").glob("*.safetensors")
    before = entry.read_bytes()
    with LLM(str(trained.old), rl=True, **SETTINGS) as llm:
        WeightSender(llm).send(trained.tensors)
        assert tokens(llm) != expected
    assert entry.read_bytes() == before
    with LLM(str(trained.old), **SETTINGS) as llm:
        assert tokens(llm) == expected


def test_modules_for_drafts_that_are_not_sent_stay_as_they_are(
    reference_named: Callable[[str], Reference], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = reference_named("deepseek-v3")
    with_modules(reference, tmp_path)
    tensors = {name: 0.9 * tensor for name, tensor in reference.model.state_dict().items()}
    with LLM(str(tmp_path), rl=True, speculative_config=MTP, **SETTINGS) as llm:
        old = llm.weight_checksums()
        WeightSender(llm).send(tensors)
        new, drafted = llm.weight_checksums(), tokens(llm)
        llm.start_weight_update()
        llm.update_weights({"update_info": {"path": str(tmp_path)}})
        llm.finish_weight_update()
        assert llm.weight_checksums() == old
    assert "MTP" in caplog.text
    same = {name for name in old if old[name] == new[name]}
    assert same
    assert all(is_of_drafts(name) for name in same), same
    with LLM(str(tmp_path), rl=True, **SETTINGS) as llm:
        WeightSender(llm).send(tensors)
        assert tokens(llm) == drafted


def test_modules_for_drafts_are_updated_by_themselves(
    reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    """As a trainer of vLLM does: all tensors in one update, and all of them again in one that only reads drafts."""
    folders = [tmp_path / name for name in ("old", "new", "later")]
    for folder, factor in zip(folders, (1.0, 0.5, 0.25), strict=True):
        folder.mkdir()
        with_modules(reference_named("deepseek-v3"), folder)
        (shard,) = folder.glob("*.safetensors")
        tensors = {name: factor * tensor for name, tensor in load_file(shard).items()}
        save_file(tensors, shard, {"format": "pt"})
    old, new, later = folders
    update = {"update_info": {"path": str(new)}}
    of_folder: dict[Path, dict[str, str]] = {}
    for folder in (new, later):
        with LLM(str(folder), rl=True, speculative_config=MTP, **SETTINGS) as llm:
            of_folder[folder] = llm.weight_checksums()
    expected = of_folder[new]
    with LLM(str(old), rl=True, speculative_config=MTP, **SETTINGS) as llm:
        before, old_tokens = llm.weight_checksums(), tokens(llm)
        llm.start_draft_weight_update()
        llm.update_weights(update)
        llm.finish_weight_update()
        found = llm.weight_checksums()
        changed = {name for name in found if found[name] != before[name]}
        assert changed
        assert all(is_of_drafts(name) for name in changed), changed
        assert all(found[name] == expected[name] for name in found if is_of_drafts(name))
        assert tokens(llm) == old_tokens
        assert llm.get_weight_version() == "default"
        with pytest.raises(ScaleError, match="checkpoint"):
            llm.scale(2)
        llm.start_weight_update()
        llm.update_weights(update)
        llm.finish_weight_update("next")
        assert llm.weight_checksums() == expected
        llm.start_draft_weight_update({name: list(tensor.shape) for name, tensor in tensors.items()})
        llm.update_weights({"update_info": {"path": str(later)}})
        llm.finish_weight_update()
        mixed = {name: of_folder[later if is_of_drafts(name) else new][name] for name in expected}
        assert (llm.weight_checksums(), llm.get_weight_version()) == (mixed, "next")
        llm.start_draft_weight_update()
        (tmp_path / "others").mkdir()
        save_file({"model.norm.weight": tensors["model.norm.weight"]}, tmp_path / "others" / "model.safetensors")
        llm.update_weights({"update_info": {"path": str(tmp_path / "others")}})
        with pytest.raises(WeightUpdateError, match="no tensor of the modules"):
            llm.finish_weight_update()
        llm.update_weights(update)  # the update has stayed open
        llm.finish_weight_update()
        assert llm.weight_checksums() == expected
        llm.sleep(2)
        llm.wake_up(["weights"])
        with pytest.raises(WeightUpdateError, match="stale"):
            llm.start_draft_weight_update()
    with (
        LLM(str(old), rl=True, **SETTINGS) as llm,
        pytest.raises(WeightUpdateError, match="speculative_config"),
    ):
        llm.start_draft_weight_update()


def is_of_drafts(name: str) -> bool:
    return "registered_modules" in name or ".registered_layers.4" in name


@pytest.mark.ranks
@pytest.mark.parametrize("options", [{}, dict(tensor_parallel_size=2)], ids=["one", "tp"])
def test_gates_of_zero_experts_that_transformers_sends_are_not_read(
    trained_named: Callable[[str], Trained], options: dict[str, Any]
) -> None:
    trained = trained_named("longcat-flash")
    expected = fresh(trained, trained.new, **options)
    with LLM(str(trained.old), rl=True, **SETTINGS, **options) as llm:
        WeightSender(llm).send(trained.tensors)
        assert (llm.weight_checksums(), tokens(llm)) == expected
