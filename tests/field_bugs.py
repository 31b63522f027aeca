"""Faults that users of serving engines reported, and the test of each kind here.

A fault that cannot occur in this design says why in place of a test. Numbers are SGLang's issues
and pull requests unless another project is named; `number` counts the list that they come from.
"""

from typing import NamedTuple


class Fault(NamedTuple):
  """`tests` are FILE::FUNCTION; where there is none, `why` says what rules the fault out."""

  number: int
  source: str
  fault: str
  tests: tuple[str, ...] = ()
  why: str = ""


def here(*names: str) -> tuple[str, ...]:
  return tuple(f"test_field_bugs::{name}" for name in names)


FAULTS = (
  # Which step and which slot is committed.
  Fault(1, "#26351", "a drafter's verify is never committed",
        here("test_every_drafter_commits")),
  Fault(2, "#31850, #32052", "a prefix is stored by the length before the verify",
        ("test_prefix_cache::test_a_generated_prefix_is_reused_as_if_prefilled",
         "test_soak::test_a_mark_of_another_depth_than_its_text_is_noticed")),
  Fault(5, "#29449", "a row freed in flight writes to its slot's next tenant",
        ("test_slots::test_padding_rows_touch_nothing",
         *here("test_a_freed_slot_is_written_by_nobody"))),
  Fault(6, "#19415", "metadata of one mode is read in another",
        here("test_stale_metadata_of_padding_rows_is_never_read")),
  Fault(7, "#27325, #28484, #27998", "a request outside the prefix cache has no index to track",
        here("test_requests_that_no_cache_tracks_run_beside_those_it_does")),
  Fault(9, "#28010", "the number of kept states changes accept length and text",
        ("test_decoding::test_greedy_text_is_plain_decodings",
         *here("test_eager_steps_are_compiled_steps"))),
  Fault(11, "TensorRT-LLM #16759", "a drafter's path never promotes the accepted state",
        here("test_a_step_commits_once_and_nothing_else_does")),
  # Rows, slots and padding.
  Fault(12, "FlashInfer #5042", "index -1 wraps to the last slot",
        ("test_window::test_slot_minus_one_reads_zeros_and_writes_nothing",
         "test_slots::test_padding_rows_touch_nothing")),
  Fault(13, "#21558, #36481", "padded and ragged verify batches read out of bounds",
        ("test_laws::test_outputs_and_states_match_the_oracle",
         "test_slots::test_every_request_and_draft_length_shares_one_compiled_step")),
  Fault(14, "vLLM #51508", "rows that accept nothing move a state",
        ("test_slots::test_padding_rows_touch_nothing",
         *here("test_rows_that_accept_nothing_move_nothing"))),
  Fault(16, "#27095", "a deferred copy is carried out again in a verify",
        here("test_a_copy_is_carried_out_once")),
  Fault(17, "TensorRT-LLM #14203, #13782", "dummy rows with uninitialised state spread NaN",
        ("test_slots::test_a_slot_is_as_good_as_new_for_its_next_tenant",
         *here("test_nan_in_slots_that_do_not_run_reaches_nobody"))),
  Fault(18, "#16067, tpu-inference #2416", "slots leak; a reused slot keeps its state",
        ("test_slots::test_nobody_is_lost_or_seated_twice",
         "test_slots::test_a_slot_is_as_good_as_new_for_its_next_tenant")),
  # The life of a ring and of deferred states.
  Fault(20, "#38485", "retraction loses the pending ring",
        ("test_slots::test_a_retracted_request_goes_on_bit_for_bit",
         "test_soak::test_a_broken_program_is_noticed")),
  Fault(22, "#37794", "an early return of one branch freezes other memories",
        here("test_every_memory_advances_by_every_commit")),
  Fault(23, "#37061", "tree drafts meet a scheme that asserts chains",
        ("test_decoding::test_greedy_text_is_plain_decodings",
         "test_slots::test_a_wrong_request_is_named_and_the_others_go_on")),
  Fault(26, "#28302 (review)", "a conv window that chains share is used for trees",
        ("test_conv::test_a_commit_slides_over_the_accepted_path",)),
  Fault(27, "#34043", "a prefix hit restores the state and no conv window",
        ("test_prefix_cache::test_a_prompt_restored_from_a_prompt_is_prefilled_bit_for_bit",
         "test_soak::test_a_broken_program_is_noticed")),
  Fault(28, "#39342, #30862", "a slot that was never written is given to the cache",
        here("test_what_was_not_marked_is_not_stored")),
  Fault(29, "#34760, #34808, #35412, #35086", "an entry's depth is not its text's length",
        ("test_prefix_cache::test_wrong_entries_are_refused",
         "test_prefix_cache::test_a_carry_with_pending_history_is_refused",
         "test_soak::test_five_hundred_random_steps")),
  # Numbers.
  Fault(31, "#28695", "open-loop folds of narrow records drift",
        ("test_laws::test_exact_folds_are_decode_bitwise",
         "test_parameters::test_records_lose_what_their_dtype_rounds",
         "test_soak::test_five_hundred_random_steps")),
  Fault(32, "#38975, vLLM #53877", "beta is rounded to bfloat16 in one of two paths",
        ("test_recurrence::test_gates_are_float32_of_the_formula",
         "test_mutants::test_a_planted_bug_is_noticed")),
  Fault(34, "sglang-jax #1587", "strong decay at a chunk boundary overflows before the mask",
        ("test_window::test_decays_of_minus_180_overflow_nowhere",
         *here("test_strong_decay_at_a_chunk_boundary"))),
  Fault(36, "#10258, sglang-jax #946", "a bfloat16 state is rounded at every token",
        ("test_parameters::test_a_narrow_checkpoint_is_rounded_once",)),
  Fault(37, "#30763, #28679, #40843", "text degenerates with length or uptime",
        ("test_soak::test_five_hundred_random_steps",)),
  # Memory and capacity.
  Fault(38, "#36889", "concurrency is capped and nobody says so",
        ("test_slots::test_what_is_admitted_fits_and_one_more_does_not",)),
  Fault(39, "#37066, #37943, #40128, #33773", "one slot is missing at the cap",
        ("test_prefix_cache::test_decoding_goes_on_while_the_cache_evicts",
         "test_slots::test_more_requests_than_slots_wait_their_turn")),
  Fault(40, "#23643", "scratch is sized by another number than the budget's",
        here("test_bytes_allocated_are_bytes_budgeted")),
  Fault(41, "#26520", "a buffer's lifetime crosses streams",
        why="a step is one XLA program; who donates a buffer and who reads it is in its types"),
  Fault(42, "sglang-jax #1667", "the state pool is duplicated although it was donated",
        ("test_donation::test_the_slots_of_an_engine_are_updated_in_place",
         "test_donation::test_pools_are_updated_in_place")),
)  # fmt: skip
