"""The promises of the project, and a fast test of each; `./scripts/test.sh --quick` runs these.

python tests/promises.py    # prints their names, as pytest takes them
"""

PROMISES = {
    "The rejection rules keep the target's distribution, by enumeration of every outcome.": [
        "tests/exact/test_enumeration.py::test_joint_distribution_equals_that_of_the_target",
    ],
    "Coupled text is plain sampling with the same noise.": [
        "tests/exact/test_coupled.py::test_coupled_text_of_real_targets_equals_the_oracle",
    ],
    "Greedy text is that of transformers' generate, and does not depend on the batch.": [
        "tests/exact/test_greedy_equality.py::test_pretrained_target_matches_greedy_generate",
    ],
    "Rounds in fixed shapes are those of growing caches.": [
        "tests/exact/test_static.py::test_static_rounds_are_those_of_growing_caches",
    ],
    "A drafter that a user writes is lossless too.": [
        "tests/inference/test_own_drafters.py::test_own_drafters_match_target_text",
    ],
    "Estimated tau is measured tau.": [
        "tests/exact/test_replay_equals_decode.py::test_rounds_agree_for_trained_heads",
    ],
    "A round waits for the device once.": [
        "tests/inference/test_loop.py::test_at_most_one_synchronisation_a_round",
    ],
    "A killed run resumes with the same bits.": [
        "tests/train/test_faults.py::test_sigterm_saves_and_the_resumed_run_is_bit_identical",
    ],
    "What a row says is learned, or the row is refused by the name of the field.": [
        "tests/inference/conversations/test_published_templates.py"
        "::test_each_field_is_there_and_learned_or_refused_by_name",
    ],
    "An export reads back bit for bit, and what an engine cannot express is refused.": [
        "tests/heads/exchange/test_exports.py::test_what_is_exported_reads_back_bit_for_bit",
        "tests/heads/exchange/test_exports.py::test_what_an_engine_cannot_express_is_refused",
    ],
    "An import gives back the drafter that was exported.": [
        "tests/commands/test_exporting.py::test_export_then_import_preserves_the_drafter",
    ],
    "A mistake is answered by one line with a remedy.": [
        "tests/command_line/test_mistakes.py",
    ],
    "No pickle and no code of a checkpoint runs; damaged files are refused.": [
        "tests/robust/test_tensor_files.py::test_a_damaged_file_is_read_or_refused_in_one_line",
        "tests/robust/test_pickles.py::test_no_pickle_runs_code",
    ],
    "Tables name what drafts, and show a loss as a loss.": [
        "tests/inference/evaluation/test_tables.py",
        "tests/inference/evaluation/test_drafter_names.py",
    ],
    "Decoding imports neither datasets, deepspeed nor wandb; imports point one way.": [
        "tests/test_structure.py::test_imports_point_one_way",
        "tests/test_structure.py"
        "::test_decoding_and_evaluation_import_neither_datasets_nor_deepspeed_nor_wandb",
    ],
    "Pages name commands, options and files that exist.": [
        "tests/test_docs.py",
        "tests/test_reference.py",
    ],
}

if __name__ == "__main__":
    print(*(test for tests in PROMISES.values() for test in tests), sep="\n")
