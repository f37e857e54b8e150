"""The corpus and the batches: deterministic, disjoint, the same on any number of ranks."""

import hashlib
import itertools
import os
from pathlib import Path

import pytest
import torch

from simplefsdp.models import DOCUMENT_SEPARATOR
from simplefsdp.train.data import Corpus, ShardedBatches, load_corpus

SEPARATOR = bytes([DOCUMENT_SEPARATOR])
TOKENS = torch.arange(8 * 23 + 1, dtype=torch.uint8)  # 23 sequences of 8, each known by its start


def batches(rank=0, world_size=1, **changes) -> ShardedBatches:
    options = {"seq_len": 8, "global_batch_size": 4, "seed": 0, "fingerprint": "f"} | changes
    return ShardedBatches(TOKENS, rank=rank, world_size=world_size, **options)


def take(loader: ShardedBatches, n: int) -> list[torch.Tensor]:
    return [inputs for inputs, _ in itertools.islice(loader, n)]


def write_folder(root: Path, documents: dict[str, bytes]) -> Path:
    for name, contents in documents.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(contents)
    return root


def split_of(corpus: Corpus) -> tuple[list[bytes], list[bytes]]:
    parts = (corpus.train, corpus.validation)
    train, validation = (bytes(p.tolist()).split(SEPARATOR)[:-1] for p in parts)
    return train, validation


# --- the corpus


def test_default_corpus_is_the_standard_library():
    corpus = load_corpus()
    assert corpus.train.dtype == corpus.validation.dtype == torch.uint8
    assert corpus.train.numel() > 5e6
    assert 0.04 < corpus.validation.numel() / corpus.train.numel() < 0.07
    text = bytes(corpus.train.tolist())
    assert Path(os.__file__).read_bytes() in text + bytes(corpus.validation.tolist())
    assert "library" in corpus.name
    assert load_corpus().fingerprint == corpus.fingerprint


def test_documents_are_whole_separated_and_on_one_side_only(tmp_path):
    documents = {f"{i % 5}/{i}.txt": bytes([65 + i % 26]) * (50 + i) for i in range(100)}
    corpus = load_corpus(write_folder(tmp_path, documents))
    train, validation = split_of(corpus)
    assert sorted(train + validation) == sorted(documents.values())
    assert validation
    assert len(validation) < len(train) / 5


def test_order_depends_on_relative_paths_only(tmp_path):
    documents = {f"{i}.txt": b"%d" % i * 40 for i in range(30)}
    a = load_corpus(write_folder(tmp_path / "a", documents))
    b = load_corpus(write_folder(tmp_path / "elsewhere", dict(reversed(documents.items()))))
    assert torch.equal(a.train, b.train)
    assert a.fingerprint == b.fingerprint
    (tmp_path / "a" / "0.txt").write_bytes(b"changed")
    assert load_corpus(tmp_path / "a").fingerprint != a.fingerprint


def test_one_file_validates_on_its_tail(tmp_path):
    contents = bytes(range(250)) * 40  # not UTF-8, which is no matter
    (tmp_path / "x.bin").write_bytes(contents)
    corpus = load_corpus(tmp_path / "x.bin")
    assert bytes(torch.cat((corpus.train, corpus.validation)).tolist()) == contents + SEPARATOR
    assert corpus.validation.numel() == 500


def test_hidden_and_repeated_files_are_left_out(tmp_path):
    write_folder(
        tmp_path,
        {
            "a.txt": b"once" * 20,
            "copy/of/a.txt": b"once" * 20,
            "b.txt": b"other" * 20,
            "empty.txt": b"",
            ".hidden": b"secret",
            ".git/config": b"secret",
            "__pycache__/a.pyc": b"secret",
        },
    )
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    corpus = load_corpus(tmp_path)
    text = bytes(torch.cat((corpus.train, corpus.validation)).tolist())
    assert sorted(text.split(SEPARATOR)) == [b"", b"once" * 20, b"other" * 20]


@pytest.mark.parametrize("max_nbytes", [1, 2, 100, 1000, 1100])
def test_reading_is_capped_and_says_so(tmp_path, max_nbytes):
    write_folder(tmp_path, {f"{i}": bytes([i]) * 99 for i in range(1, 11)})
    if max_nbytes < 2:
        with pytest.raises(ValueError, match="no text in"):
            load_corpus(tmp_path, max_nbytes=max_nbytes)
        return
    corpus = load_corpus(tmp_path, max_nbytes=max_nbytes)
    assert corpus.train.numel() + corpus.validation.numel() == min(max_nbytes, 1000)
    assert ("first" in corpus.name) == (max_nbytes < 1000)


def test_bad_paths_are_named(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"missing.txt does not exist .*pass an existing"):
        load_corpus(tmp_path / "missing.txt")
    with pytest.raises(ValueError, match=r"no text in .*empty.txt: found an empty file"):
        load_corpus(tmp_path / "empty.txt")
    with pytest.raises(ValueError, match=r"no text in .*folder: found 0 files"):
        load_corpus(tmp_path / "folder")
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        load_corpus(tmp_path / "pipe")


def test_unreadable_file_is_an_error_rather_than_another_corpus(tmp_path, monkeypatch):
    write_folder(tmp_path, {"a.txt": b"a" * 50, "b.txt": b"b" * 50})
    opened = Path.open

    def refuse(self, *args, **kwargs):  # permissions do not stop root, who may run this
        if self.name == "b.txt":
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"cannot read .*b.txt: Permission denied; make it"):
        load_corpus(tmp_path)


# --- the batches


def test_targets_are_the_next_tokens():
    inputs, targets = next(batches())
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (4, 8)
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(targets, inputs + 1)  # because TOKENS counts


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_are_disjoint_and_together_give_the_same_batches(world_size):
    alone = take(batches(), 13)
    ranks = [take(batches(rank, world_size), 13) for rank in range(world_size)]
    assert ranks[0][0].shape == (4 // world_size, 8)
    for whole, *parts in zip(alone, *ranks, strict=True):
        assert torch.equal(torch.cat(parts), whole)


def test_an_epoch_repeats_nothing_and_the_next_is_in_another_order():
    loader = batches()
    assert loader.batches_per_epoch == 5
    epochs = []
    for epoch in range(3):
        starts = torch.cat(take(loader, 5))[:, 0].tolist()
        assert loader.epoch == epoch
        assert len(set(starts)) == 20
        assert all(start % 8 == 0 for start in starts)
        epochs.append(starts)
    assert epochs[0] != epochs[1] != epochs[2]
    assert set(itertools.chain(*epochs)) == set(range(0, 184, 8))  # the remainder gets its turn


def test_seed_decides_the_order():
    first = [torch.cat(take(batches(seed=seed), 5)) for seed in (0, 0, 1)]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])


def test_order_is_the_same_for_ever():
    """A checkpoint of today must find its place after an upgrade of Python or torch."""
    starts = torch.cat(take(batches(), 7))[:, 0]
    digest = hashlib.sha256(bytes(starts.tolist())).hexdigest()
    assert digest[:16] == "7a234fd0cc124cce"


@pytest.mark.parametrize("done", [0, 3, 5, 7])
def test_resume_continues_on_any_number_of_ranks(done):
    before = batches()
    take(before, done)
    state = before.state_dict()
    assert {type(value) for value in state.values()} <= {int, str}
    expected = take(before, 8)
    after = [batches(rank, 2) for rank in range(2)]
    for loader in after:
        loader.load_state_dict(state)
    for whole in expected:
        assert torch.equal(torch.cat([next(loader)[0] for loader in after]), whole)
    assert after[0].epoch == before.epoch
    assert after[0].state_dict() == after[1].state_dict() == before.state_dict()


def test_resume_with_another_batch_size_repeats_nothing_in_the_epoch():
    before = batches()
    seen = torch.cat(take(before, 3))[:, 0].tolist()
    after = batches(global_batch_size=2)
    after.load_state_dict(before.state_dict())
    seen += torch.cat(take(after, 5))[:, 0].tolist()
    assert after.epoch == 0
    assert len(set(seen)) == 22


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fingerprint": "other"}, "saved with fingerprint = f, this run has other"),
        ({"seq_len": 4}, "saved with seq_len = 8, this run has 4"),
        ({"seed": 1}, "saved with seed = 0, this run has 1"),
    ],
)
def test_resume_with_other_data_is_refused_and_changes_nothing(changes, message):
    before = batches()
    take(before, 3)
    loader = batches(**changes)
    untouched = loader.state_dict()
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict(before.state_dict())
    assert loader.state_dict() == untouched


@pytest.mark.parametrize("damage", [{"cursor": 99}, {"cursor": -1}, {"epoch": "one"}])
def test_damaged_position_is_refused(damage):
    with pytest.raises(ValueError, match="damaged data position"):
        batches().load_state_dict(batches().state_dict() | damage)
    state = batches().state_dict()
    del state["fingerprint"]
    with pytest.raises(ValueError, match="saved with fingerprint = nothing"):
        batches().load_state_dict(state)


def test_a_text_of_less_than_a_batch_is_refused():
    with pytest.raises(ValueError, match="24 sequences of 8 tokens needs 193 bytes of text, got 1"):
        batches(global_batch_size=24)
