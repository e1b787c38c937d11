from hybrid_engine.bench import three_kinds


def test_the_next_turn_of_a_model_of_three_kinds_is_found_up_to_its_last_token():
    (report,) = three_kinds.run(num_rounds=1, num_threads=1, prompt_tokens=96)
    figures = {figure.name: figure for figure in report.figures}
    num_prompt = 96 + three_kinds.NEW_TOKENS + three_kinds.TURN_TOKENS
    found = 96 + three_kinds.NEW_TOKENS - 1
    assert figures["found of the next turn's prompt"].values == (100 * found / num_prompt,)
    assert "full_attention 16" in report.notes[1]
    assert "sliding_window 32" in report.notes[1]
