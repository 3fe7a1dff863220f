"""What has gone wrong in other servers, by class, and the tests here that would notice it in this one.

Those of this directory name the vulnerabilities themselves; the others are about more than one of them, or stand beside
what they test. A row counts only as long as each of its tests exists.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent

CODE = {
    "CVE-2024-11041 CVE-2024-9052 CVE-2025-66455 CVE-2026-15971 CVE-2026-111391 pickle and eval": (
        "test_architecture.py::test_nothing_dangerous_or_hidden_is_used",
        "security/test_fuzzing.py::test_any_bytes_are_taken_or_refused_in_one_line",
    ),
    "CVE-2025-9141 CVE-2026-61539 calls in a model's text are never evaluated": (
        "test_architecture.py::test_nothing_dangerous_or_hidden_is_used",
        "server/test_tool_parsers.py::test_texts_of_models",
    ),
    "CVE-2026-46432 CVE-2026-27893 CVE-2026-22807 CVE-2025-66448 code of a checkpoint": (
        "model/test_config.py::test_code_named_by_a_config_is_neither_run_nor_needed",
    ),
    "CVE-2025-24357 CVE-2025-33255 CVE-2026-24142 CVE-2026-65119 pickled weights": (
        "model/test_weights_checkpoint.py::test_pickled_weights_are_refused_unread_with_a_way_out",
    ),
    "CVE-2026-47155 what is read is what is told of": (
        "model/test_weights_checkpoint.py::test_the_digest_of_weights_changes_with_any_of_them_and_with_nothing_else",
    ),
    "CVE-2026-54232 packages of another index": (
        "deploy/test_image.py::test_a_lock_pins_every_package_with_hashes_and_names_no_index",
    ),
}
IDENTITY = {
    "CVE-2026-48746 CVE-2026-48710 the path by which a key is asked for": (
        "server/test_access.py::test_a28_every_route_but_health_needs_a_key",
        "server/test_access.py::test_a_host_that_is_none_is_refused",
        "server/test_access.py::test_an_absolute_target_opens_nothing",
    ),
    "CVE-2025-59425 comparing keys": (
        "server/test_access.py::test_the_key_is_compared_by_digests_without_an_early_end",
    ),
    "CVE-2026-112266 ids of others": ("server/test_refusals.py::test_a01_equal_request_ids_do_not_meet",),
    "CVE-2025-46570 CVE-2025-25183 prefixes of others": (
        "kvcache/test_prefix.py::test_the_salt_changes_every_name",
        "scheduler/test_policy.py::test_requests_of_another_salt_find_nothing",
    ),
    "CVE-2026-53923 memory of others": (
        "model/test_poison.py::test_a_block_that_nobody_wrote_fails_the_row_that_reads_it",
    ),
    "GHSA-v97p-wpxp-px84 GHSA-fpch-3xrf-7q96 tokens of others": (
        "serving/test_soak.py::test_requests_to_a_scripted_engine_in_virtual_time",
        "model/test_slots.py::test_a_slot_is_retired_and_given_away_within_one_step",
    ),
}
ONE_REQUEST = {
    "CVE-2026-105922 CVE-2026-44223 penalties": (
        "model/test_step_allocations.py::test_no_step_makes_a_tensor_larger_than_4_kib",
        "scheduler/test_faults.py::test_f2_f3_a_poisoned_request_fails_alone",
    ),
    "CVE-2026-71486 any number of ids": ("server/test_limits.py::test_a08_a_refusal_does_no_work_and_keeps_no_memory",),
    "GHSA-hf3c-wxg2-49q9 CVE-2025-29770 grammars that are kept": (
        "server/test_structured.py::test_verdicts_are_kept_up_to_a_number_of_bytes",
        "server/test_structured.py::test_hundreds_of_different_schemas_leave_no_memory_behind",
    ),
    "CVE-2026-55574 grammars that take long": (
        "server/test_structured.py::test_f02_a_grammar_that_takes_too_long_is_given_up_and_delays_no_other",
    ),
    "CVE-2025-71379 CVE-2025-48887 expressions of the parsers": (
        "server/test_tool_parsers.py::test_b20_every_chunking_gives_the_same_calls",
    ),
    "CVE-2025-48956 large heads": (
        "server/test_limits.py::test_a_head_that_is_too_large_is_refused",
        "server/test_limits.py::test_a_head_that_never_ends_is_not_kept",
    ),
    "CVE-2007-6750 slow clients": (
        "server/test_wire_deadlines.py::test_f8_five_hundred_dripping_connections_hold_nobody_up",
    ),
    "large and deep bodies": (
        "server/test_refusals.py::test_a30_a_body_sent_in_pieces_is_measured_too",
        "server/test_limits.py::test_a30_objects_nested_too_deep_are_refused",
        "server/test_limits.py::test_a30_numbers_of_any_length_are_read_or_refused",
    ),
    "long texts": ("server/test_limits.py::test_d11_the_event_loop_turns_while_two_megabytes_are_tokenised",),
    "PYSEC-2026-4361 what is remembered of requests": (
        "server/test_structured.py::test_verdicts_are_kept_up_to_a_number_of_bytes",
    ),
    "uvicorn #2754 CVE-2026-94627 what clients that leave leave behind": (
        "server/test_storm.py::test_f6_a_hundred_and_fifty_clients_that_leave_at_random_points_leave_nothing_behind",
        "serving/test_history.py::test_a_broken_invariant_is_noticed",
    ),
}
FILES = {
    "CVE-2024-23605 CVE-2024-21802 CVE-2025-53630 CVE-2026-27940 CVE-2026-33298 numbers of a GGUF header": (
        "model/test_weights_gguf_file.py::test_no_length_or_count_in_a_header_is_believed",
        "model/test_weights_gguf_file.py::test_bytes_flipped_in_the_header_never_raise_anything_else",
    ),
    "CVE-2026-7482 CVE-2025-66959 CVE-2025-66960 tensors beyond the file": (
        "model/test_weights_gguf_file.py::test_a_file_cut_anywhere_is_refused",
    ),
    "headers of safetensors": ("model/test_weights_checkpoint.py::test_no_entry_of_a_safetensors_header_is_believed",),
    "CVE-2025-23310 CVE-2025-23319 CVE-2025-23320 many chunks": (
        "server/test_wire.py::test_many_small_chunks_make_one_body",
    ),
}
CLASSES = {**CODE, **IDENTITY, **ONE_REQUEST, **FILES}


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", CLASSES)
def test_each_class_has_its_tests(name: str) -> None:
    for test in CLASSES[name]:
        file, _, function = test.partition("::")
        assert function in functions_of(file), test
