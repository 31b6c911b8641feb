"""Number guessing: its rules, and one game per seed."""

from __future__ import annotations

import pytest

from torchrl_rloo.envs.text.games import GuessNumber


def test_bisection_always_finds_the_number_in_time():
    for secret in range(1, 32):
        game = GuessNumber(1, 31, max_turns=5)
        game.reset(options={"secret": secret})
        low, high, total = 1, 31, 0.0
        for _ in range(5):
            guess = (low + high) // 2
            answer, reward, ended, truncated, info = game.step(f"I say {guess}")
            total += reward
            assert info["found"] == ended == (answer == "yes") and not truncated
            if ended:
                break
            low, high = (guess + 1, high) if answer == "higher" else (low, guess - 1)
        assert ended and total == pytest.approx(1 - 0.05 * (game.turns - 1))


def test_a_seed_is_a_game_and_seeds_differ():
    def secret(seed: int) -> int:
        game = GuessNumber(1, 1000)
        game.reset(seed=seed)
        return game.secret

    assert [secret(seed) for seed in range(20)] == [secret(seed) for seed in range(20)]
    assert len({secret(seed) for seed in range(20)}) > 15


def test_who_runs_out_of_guesses_has_lost():
    game = GuessNumber(1, 8, max_turns=3, turn_cost=0.125)
    game.reset(options={"secret": 8})
    assert game.step("1 or 2") == ("higher", -0.125, False, False, {"found": False})
    assert game.step("hello") == ("number?", -0.125, False, False, {"found": False})
    assert game.step("9" * 5000) == ("number?", -0.125, True, False, {"found": False})


def test_options_say_what_the_game_is():
    game = GuessNumber()
    assert game.reset(seed=3, options={"low": 10, "high": 12, "answer": "x"})[0] == "Guess a number from 10 to 12."
    assert 10 <= game.secret <= 12
    with pytest.raises(ValueError, match="low=5 and high=5"):
        game.reset(options={"low": 5, "high": 5})
    with pytest.raises(ValueError, match="max_turns=0"):
        GuessNumber(max_turns=0)
