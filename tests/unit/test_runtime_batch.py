"""Packing: the worked examples of the design, array by array."""

from __future__ import annotations

from tests.unit.runtime_harness import VOCAB_SIZE, Harness, alone, random_tokens


def test_prompts_of_31_29_and_30_tokens_make_one_prefill_of_90() -> None:
    harness = Harness()
    prompts = [random_tokens(count, seed=count) for count in (31, 29, 30)]
    requests = [harness.add(prompt, max_tokens=1) for prompt in prompts]
    harness.step()

    (step,) = harness.steps
    assert step.token_ids.tolist() == prompts[0] + prompts[1] + prompts[2]
    assert step.positions.tolist() == [*range(31), *range(29), *range(30)]
    assert step.query_start_loc.tolist() == [0, 31, 60, 90]
    assert step.prefix_offsets.tolist() == [0, 0, 0]
    assert step.block_tables.tolist() == [[0, 1], [2, 3], [4, 5]]
    # Every sequence takes two consecutive blocks of 16, the second one not to its end.
    assert step.slot_mapping.tolist() == [*range(31), *range(32, 61), *range(64, 94)]
    assert step.logits_indices.tolist() == [30, 59, 89]
    assert [r.output_token_ids for r in requests] == [alone(prompt, 1) for prompt in prompts]


def test_a_prompt_of_48_tokens_in_chunks_of_16() -> None:
    """K05: a chunk that is not the last one samples nothing."""
    harness = Harness(max_num_batched_tokens=16)
    prompt = random_tokens(48)
    request = harness.add(prompt, max_tokens=1)
    gained = [len(harness.step()) for _ in range(3)]

    keys = [int(s.prefix_offsets[0] + s.query_start_loc[-1]) for s in harness.steps]
    queries = [len(step.token_ids) for step in harness.steps]
    assert queries == [16, 16, 16]
    assert keys == [16, 32, 48]
    units = sum(q * k for q, k in zip(queries, keys, strict=True)) // (16 * 16)
    assert (units, 48 * 48 // (16 * 16)) == (6, 9)
    assert gained == [0, 0, 1]
    assert [step.logits_indices.tolist() for step in harness.steps] == [[], [], [15]]
    assert [step.positions[0] for step in harness.steps] == [0, 16, 32]
    assert request.output_token_ids == alone(prompt, 1)


def test_a_prompt_of_107_tokens_with_48_cached_feeds_59() -> None:
    harness = Harness()
    shared = random_tokens(48)
    harness.add(shared + random_tokens(10, seed=1), max_tokens=1)
    harness.run()
    prompt = shared + random_tokens(59, seed=2)
    request = harness.add(prompt, max_tokens=1)
    harness.step()

    step = harness.steps[-1]
    assert len(prompt) == 107
    assert step.token_ids.tolist() == prompt[48:]
    assert len(step.token_ids) == 59
    assert step.positions.tolist() == list(range(48, 107))
    assert step.prefix_offsets.tolist() == [48]
    assert step.logits_indices.tolist() == [58]
    assert request.num_cached_tokens == 48
    assert request.output_token_ids == alone(prompt, 1)


def test_one_sampled_token_and_4_drafts_are_verified_in_one_step() -> None:
    harness = Harness()
    prompt = random_tokens(20)
    request = harness.add(prompt, max_tokens=30)
    harness.step()
    sampled = request.output_token_ids
    drafts = alone(prompt, 5)[1:]
    request.set_drafts(drafts)
    harness.step()

    step = harness.steps[-1]
    assert step.token_ids.tolist() == sampled + drafts
    assert step.positions.tolist() == [20, 21, 22, 23, 24]
    assert step.prefix_offsets.tolist() == [20]
    assert step.logits_indices.tolist() == [0, 1, 2, 3, 4]
    assert step.slot_mapping.tolist() == [20, 21, 22, 23, 24]
    assert request.output_token_ids == alone(prompt, 6)


def test_rejected_drafts_leave_no_trace() -> None:
    harness = Harness(block_size=4)
    prompt = random_tokens(6)
    request = harness.add(prompt, max_tokens=20)
    harness.step()
    right = alone(prompt, 3)
    wrong = [(right[2] + 1) % VOCAB_SIZE, 5, 6, 7, 8]
    request.set_drafts([right[1], *wrong])
    harness.step()
    assert request.output_token_ids == right
    assert len(request.block_ids) == 2  # of the 4 that the drafts needed
    harness.run()
    assert request.output_token_ids == alone(prompt, 20)


def test_prefill_and_decode_share_a_step() -> None:
    harness = Harness(max_num_batched_tokens=20)
    first, second = random_tokens(18, seed=1), random_tokens(40, seed=2)
    harness.add(first)
    harness.add(second)
    harness.step()
    harness.step()
    assert harness.steps[0].query_start_loc.tolist() == [0, 18, 20]
    assert harness.steps[0].logits_indices.tolist() == [17]
    assert harness.steps[1].query_start_loc.tolist() == [0, 1, 20]
    assert harness.steps[1].prefix_offsets.tolist() == [18, 2]
    assert harness.steps[1].positions.tolist() == [18, *range(2, 21)]
    assert harness.steps[1].logits_indices.tolist() == [0]
