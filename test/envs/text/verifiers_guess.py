"""Environment of verifiers with several turns: a number is guessed, and the environment answers as the user."""

import itertools

import verifiers.v1 as vf

from torchrl_rloo.envs.text.games import GuessNumber


class GuessData(vf.TaskData):
    seed: int


class GuessTask(vf.Task[GuessData]):
    pass


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for seed in itertools.count():
            yield GuessTask(GuessData(prompt=GuessNumber().reset(seed=seed)[0], seed=seed), self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        game, total = GuessNumber(), 0.0
        game.reset(seed=task.data.seed)
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                answer, reward, done, *_ = game.step(segment.last_reply)
                total += reward
                if done:
                    break
                segment = await interaction.turn(answer)
        interaction.trace.record_reward("game", total)


__all__ = ["GuessEnv", "GuessTaskset"]
