"""Proximal policy optimisation (Schulman et al. 2017) with one of our cores as the memory, as an SB3 algorithm."""

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import FloatSchedule, explained_variance, obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor, nn

from ..core import State
from ..errors import UserError, nearest
from ..ranges import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, SHARE, Range, check_ranges
from .policy import RecurrentCnnPolicy, RecurrentMultiInputPolicy, RecurrentPolicy, unknown_option
from .rollout import Minibatch, Rollout, advantages, each, stacked
from .vector import Step, VectorEnvAdapter

Self = TypeVar("Self", bound="RecurrentPPO")
LOGGED = ("loss", "policy_gradient_loss", "value_loss", "entropy_loss", "approx_kl", "clip_fraction")  # of a minibatch


class RecurrentPPO(OnPolicyAlgorithm):
    """PPO for policies that remember.

    ``L = E[-min(r A, clip(r, 1 - eps, 1 + eps) A)] + c_v E[(V - R)^2] - c_e E[H]``, ``r = pi(a|s) / pi_old(a|s)`` (Schulman
    et al. 2017, equations 7 and 9).

    A minibatch is made of whole sequences, run by the core in one go. The state is kept where a sequence starts; gradients
    end there. An episode's first step begins with the core's initial state, which is trained like everything else.

    With ``fabric`` of several processes each has environments of its own, as many as the others, and all make one update
    together: the one that a single process with all the environments would make, but for rounding. Numbers of steps, and
    ``batch_size``, are then those of all processes, and so are the logged values in each. Callbacks run in every process
    and have to decide alike.

    ``load`` is Stable-Baselines3's and unpickles: it can execute anything, so give it only what you saved yourself. Agents of
    others are opened from run folders (``worldmodels.agents.run.load_agent``).

    Args:
        policy: "MlpPolicy", "CnnPolicy", "MultiInputPolicy", or a subclass of ``RecurrentPolicy``.
        env: what SB3 takes (a Gymnasium environment, its id, a ``VecEnv``), or a ``gymnasium.vector.VectorEnv`` in any
            autoreset mode. Our batched environments never leave their device; there callbacks see tensors in ``locals`` and
            no infos, and episode statistics come once a rollout.
        core: a name of ``worldmodels cores``, or the path of a class; gnn, snps, pnps, routing and mlp have no memory.
        core_kwargs: ``num_slots``, ``slot_size`` and options of the core, see ``RecurrentPolicy``.
        learning_rate: of Adam; a number or a function of the share of training that is left.
        n_steps: steps of every environment between two updates.
        batch_size: steps of a minibatch, a multiple of ``sequence_length``.
        n_epochs: passes over a rollout.
        gamma: discount.
        gae_lambda: of the advantages.
        clip_range: eps; a number or a function as above.
        clip_range_vf: how far a value may move from the old one; None for no limit.
        normalize_advantage: mean 0 and standard deviation 1 in every minibatch.
        ent_coef: c_e.
        vf_coef: c_v.
        max_grad_norm: largest norm of the gradient.
        target_kl: stop an update when the policy has moved 1.5 times as far; None for no limit.
        critic: "shared" core or one of its "own".
        sequence_length: steps through which gradients flow, a divisor of ``n_steps``; None for all of them.
        stats_window_size: episodes over which logged returns are averaged.
        tensorboard_log: folder of TensorBoard events, or None.
        policy_kwargs: of the policy, as in SB3.
        verbose: 0 silent, 1 tables.
        seed: of everything random; several processes are given the same.
        device: "auto", "cpu", "cuda".
        fabric: Lightning Fabric, launched, whose processes learn together; None for one process.
        others: none; a name that is not known is refused, with the nearest that is.

    Raises:
        UserError: a policy, a core or an option that is not known, values out of their range, or sizes that do not fit
            together.
    """

    policy: RecurrentPolicy
    rollout_buffer: Rollout  # type: ignore[assignment]
    policy_aliases: ClassVar[dict[str, type[RecurrentPolicy]]] = {  # type: ignore[assignment]
        "MlpPolicy": RecurrentPolicy,
        "CnnPolicy": RecurrentCnnPolicy,
        "MultiInputPolicy": RecurrentMultiInputPolicy,
    }

    def __init__(
        self,
        policy: str | type[RecurrentPolicy],
        env: Any,
        core: str = "lstm",
        core_kwargs: Mapping[str, Any] | None = None,
        learning_rate: Annotated[Any, Range(above=0, most=10)] = 3e-4,
        n_steps: Annotated[int, AT_LEAST_ONE] = 128,
        batch_size: Annotated[int, AT_LEAST_ONE] = 128,
        n_epochs: Annotated[int, AT_LEAST_ONE] = 10,
        gamma: Annotated[float, SHARE] = 0.99,
        gae_lambda: Annotated[float, SHARE] = 0.95,
        clip_range: Annotated[Any, POSITIVE] = 0.2,
        clip_range_vf: Annotated[Any, POSITIVE] = None,
        normalize_advantage: bool = True,
        ent_coef: Annotated[float, NOT_NEGATIVE] = 0.0,
        vf_coef: Annotated[float, NOT_NEGATIVE] = 0.5,
        max_grad_norm: Annotated[float, POSITIVE] = 0.5,
        target_kl: Annotated[float | None, POSITIVE] = None,
        critic: str = "shared",
        sequence_length: Annotated[int | None, AT_LEAST_ONE] = None,
        stats_window_size: Annotated[int, AT_LEAST_ONE] = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: torch.device | str = "auto",
        fabric: Any = None,
        _init_setup_model: bool = True,
        **others: Any,
    ):
        for name, value in others.items():
            known = [option for option in inspect.signature(RecurrentPPO).parameters if option != "others"]
            raise unknown_option("RecurrentPPO", name, value, known)
        super().__init__(
            policy,
            env,
            learning_rate=learning_rate,
            n_steps=n_steps,
            gamma=gamma,
            gae_lambda=gae_lambda,
            ent_coef=ent_coef,
            vf_coef=vf_coef,
            max_grad_norm=max_grad_norm,
            use_sde=False,
            sde_sample_freq=-1,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            seed=seed,
            device=device,
            _init_setup_model=False,
            supported_action_spaces=(spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary),
        )
        self.core, self.core_kwargs, self.critic = core, dict(core_kwargs or {}), critic
        self.batch_size, self.n_epochs, self.sequence_length = batch_size, n_epochs, sequence_length
        self.clip_range, self.clip_range_vf = clip_range, clip_range_vf
        self.normalize_advantage, self.target_kl = normalize_advantage, target_kl
        self.fabric = fabric if fabric is not None and fabric.world_size > 1 else None
        if _init_setup_model:
            self._setup_model()

    def _get_policy_from_name(self, policy_name: str) -> type[RecurrentPolicy]:
        if policy_name in self.policy_aliases:
            return self.policy_aliases[policy_name]
        plain = policy_name.replace("Lstm", "")
        if plain in self.policy_aliases:
            raise UserError(f'policy is "{policy_name}", a name of sb3-contrib; use "{plain}" with core="lstm"')
        raise UserError(f'unknown policy "{policy_name}"; {nearest(policy_name, self.policy_aliases)}')

    @staticmethod
    def _wrap_env(env: Any, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        if isinstance(env, VectorEnv):
            return VectorEnvAdapter(env)
        return BaseAlgorithm._wrap_env(env, verbose, monitor_wrapper)

    def _setup_model(self) -> None:
        check_ranges("", RecurrentPPO, vars(self))
        first_env, all_envs = self._share()
        L = self.n_steps if self.sequence_length is None else self.sequence_length
        if self.n_steps % L:
            best = _largest_divisor(self.n_steps, L)
            raise UserError(f"sequence_length is {L}; it must divide n_steps, {self.n_steps}, as {best} does")
        rollout = self.n_steps * all_envs
        if self.batch_size % L or not L <= self.batch_size <= rollout:
            best = L * _largest_divisor(rollout // L, max(1, self.batch_size // L))
            raise UserError(
                f"batch_size is {self.batch_size}; a minibatch is whole sequences of sequence_length={L} steps (n_steps "
                f"unless told otherwise), so give a multiple of {L} up to n_steps x environments = {rollout}, like {best}"
            )
        if rollout % self.batch_size:
            warnings.warn(
                f"a rollout has {rollout} steps, no multiple of batch_size={self.batch_size}: its last "
                "minibatch will be smaller",
                UserWarning,
                stacklevel=2,
            )
        self._setup_lr_schedule()
        self.set_random_seed(self.seed)
        for name in {"core", "core_kwargs", "critic"} & set(self.policy_kwargs):
            raise UserError(f"policy_kwargs has {name!r}; give {name}= to RecurrentPPO itself")
        self.policy = self.policy_class(  # type: ignore[assignment]
            self.observation_space,
            self.action_space,
            self.lr_schedule,
            core=self.core,
            core_kwargs=self.core_kwargs,
            critic=self.critic,
            **self.policy_kwargs,
        ).to(self.device)
        self.rollout_buffer = Rollout(
            self.n_steps,
            self.n_envs,
            L,
            self.observation_space,
            self.action_space,
            torch.device(self.device),
            first_env,
            all_envs,
        )
        self.clip_range = FloatSchedule(self.clip_range)
        if self.clip_range_vf is not None:
            self.clip_range_vf = FloatSchedule(self.clip_range_vf)

    def _share(self) -> tuple[int, int]:
        """How many environments come before this process's own, and how many all processes have.

        Raises:
            ValueError: environments or a seed that several processes cannot share.
        """
        if self.fabric is None:
            return 0, self.n_envs
        if not isinstance(self.env, VectorEnvAdapter) or self.seed is None:
            raise ValueError(
                f"{self.fabric.world_size} processes learn together; give each a gymnasium.vector.VectorEnv and the same seed"
            )
        self.env.first_env = self.fabric.global_rank * self.n_envs
        return self.env.first_env, self.fabric.world_size * self.n_envs

    def set_env(self, env: Any, force_reset: bool = True) -> None:
        """Learn from other environments from now on; as in SB3."""
        super().set_env(env, force_reset)
        self._share()

    def _excluded_save_params(self) -> list[str]:
        own = ["_last_obs", "_last_episode_starts", "_state", "_empty", "_returns", "_lengths"]  # go together
        return [*super()._excluded_save_params(), *own, "fabric"]

    def _setup_learn(
        self, total_timesteps: int, callback: Any = None, reset_num_timesteps: bool = True, *args: Any, **kwargs: Any
    ) -> tuple[int, BaseCallback]:
        fresh = reset_num_timesteps or self._last_obs is None
        result = super()._setup_learn(total_timesteps, callback, reset_num_timesteps, *args, **kwargs)
        if fresh:  # SB3 has reset the environments
            self.forget()
        return result

    @torch.no_grad()
    def forget(self) -> None:
        """Stand where an episode begins in every environment, as after a reset."""
        B = self.n_envs
        self._state = {name: leaf.clone() for name, leaf in self.policy.initial_state(B).items()}
        self._last_episode_starts = torch.ones(B, dtype=torch.bool, device=self.device)  # type: ignore[assignment]
        self._empty = torch.zeros(B, dtype=torch.bool, device=self.device)
        counted = self.rollout_buffer.all_envs
        self._returns, self._lengths = np.zeros(counted), np.zeros(counted, dtype=int)

    def learn(
        self: Self,
        total_timesteps: int,
        callback: Any = None,
        log_interval: int = 1,
        tb_log_name: str = "RecurrentPPO",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> Self:
        """Train for so many steps of all environments together; arguments as in SB3, whose bar counts one process only."""
        progress_bar = progress_bar and self.fabric is None
        return super().learn(total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar)

    @torch.no_grad()
    def collect_rollouts(  # type: ignore[override]
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: Rollout, n_rollout_steps: int
    ) -> bool:
        """Fill the rollout; returns False if a callback stops training."""
        buffer, empty, state = rollout_buffer, self._empty, self._state
        starts: Tensor = self._last_episode_starts  # type: ignore[assignment]
        on_device = isinstance(env, VectorEnvAdapter) and env.takes_tensors
        infos: list[dict[str, Any]]
        told = False
        among = None if self.fabric is None else (buffer.first_env, buffer.all_envs)
        buffer.states.clear()
        self.policy.set_training_mode(False)
        callback.on_rollout_start()
        new_obs = each(self._to_device, self._last_obs)
        cut: list[
            tuple[int, Tensor, Tensor]
        ] = []  # step, rows, and values of last observations that were restarted at once
        for t in range(n_rollout_steps):
            if t % buffer.sequence_length == 0:
                buffer.states.append(state)
            _put(buffer.observations, t, new_obs)
            buffer.starts[t], buffer.valid[t] = starts, ~empty
            with self._finite_outputs():
                actions, values, log_probs, state = self.policy(new_obs, state, starts, among=among)
            buffer.actions[t], buffer.values[t], buffer.log_probs[t] = actions, values, log_probs
            clipped_actions = self.policy.bounded(actions)
            if isinstance(env, VectorEnvAdapter):
                step, infos = env.advance(clipped_actions), []
            else:
                step, infos = _sb3_step(env, clipped_actions)
            step = _on(step, self.device)
            self.num_timesteps += buffer.all_envs
            new_obs, rewards, dones = step.observations, step.rewards, step.terminated | step.truncated
            buffer.rewards[t], buffer.terminated[t], buffer.truncated[t] = rewards, step.terminated, step.truncated
            buffer.success[t] = False if step.success is None else step.success
            told |= step.success is not None
            starts, empty = step.starts, step.empty
            # Learning can go on from here, whatever ends this rollout early.
            self._last_obs, self._last_episode_starts, self._empty, self._state = new_obs, starts, empty, state  # type: ignore[assignment]
            if not on_device:  # callbacks of SB3 count dones with numpy
                rewards, dones = rewards.cpu().numpy(), dones.cpu().numpy()
            callback.update_locals(locals())
            if not callback.on_step():
                return False
            if infos:
                self._update_info_buffer(infos, dones)
            if step.final is not None:
                rows, last = step.final
                kept = {name: leaf[rows] for name, leaf in state.items()}
                cut.append((t, rows, self.policy.predict_values(last, kept, torch.zeros_like(rows, dtype=torch.bool))))
        buffer.next_values[:-1] = buffer.values[1:]
        buffer.next_values[-1] = self.policy.predict_values(new_obs, state, starts)
        for t, rows, values in cut:
            buffer.next_values[t, rows] = values
        buffer.advantages = advantages(
            buffer.rewards,
            buffer.values,
            buffer.next_values,
            buffer.terminated,
            buffer.truncated,
            self.gamma,
            self.gae_lambda,
        )
        if isinstance(env, VectorEnvAdapter):
            self._count_episodes(buffer, env.team_size, told=told)
        callback.update_locals(locals())
        callback.on_rollout_end()
        return True

    def _to_device(self, part: Any) -> Tensor:
        return part.to(self.device) if isinstance(part, Tensor) else obs_as_tensor(part, self.device)  # type: ignore[return-value]

    def _count_episodes(self, buffer: Rollout, team_size: int, *, told: bool) -> None:
        """Returns and lengths of the episodes of all processes that ended in this rollout; one transfer from the device.

        An episode of a team is one, though each of its agents is an environment.
        """
        assert self.ep_info_buffer is not None and self.ep_success_buffer is not None
        ended = buffer.terminated | buffer.truncated
        tells = torch.full_like(ended, told)
        parts = self._of_all(buffer.rewards, ended, buffer.valid, buffer.success, tells).cpu().numpy()
        rewards, (ended, valid, success, tells) = parts[0], parts[1:].astype(bool)
        for t in range(len(ended)):
            self._returns += rewards[t] * valid[t]
            self._lengths += valid[t]
            for row in np.flatnonzero(ended[t, ::team_size]) * team_size:
                self.ep_info_buffer.append({"r": float(self._returns[row]), "l": int(self._lengths[row])})
                if tells.any():
                    self.ep_success_buffer.append(bool(success[t, row]))
            self._returns[ended[t]], self._lengths[ended[t]] = 0.0, 0

    def _of_all(self, *parts: Tensor) -> Tensor:
        """What the rollouts ``(T, B)`` of all processes hold, side by side in the order of their environments."""
        buffer = self.rollout_buffer
        whole = torch.zeros(len(parts), buffer.num_steps, buffer.all_envs, device=self.device)
        whole[:, :, buffer.first_env : buffer.first_env + buffer.num_envs] = torch.stack(
            [part.float() for part in parts]
        )
        return self._summed(whole)

    def _summed(self, own: Tensor) -> Tensor:
        """The sum of what the processes have."""
        if self.fabric is None:
            return own
        total: Tensor = self.fabric.all_reduce(own, reduce_op="sum")
        return total

    def train(self) -> None:
        """Update the policy with the rollout."""
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        clip_range = self.clip_range(self._current_progress_remaining)
        clip_range_vf = None if self.clip_range_vf is None else self.clip_range_vf(self._current_progress_remaining)
        measured = []
        for epoch in range(self.n_epochs):
            near = True
            for batch in self.rollout_buffer.minibatches(self.batch_size):
                with self._finite_outputs():
                    loss, values = self._loss(batch, clip_range, clip_range_vf)
                near = self.target_kl is None or float(values["approx_kl"]) <= 1.5 * self.target_kl
                values["gradient_norm"] = self._descend(loss) if near else torch.zeros_like(values["loss"])
                measured.append(torch.stack(list(values.values())))
                if not near:
                    break
            self._n_updates += 1
            if not near:
                if self.verbose >= 1:
                    print(f"update stopped after {epoch + 1} epochs: the policy moved further than target_kl")
                break
        means = dict(zip(values, torch.stack(measured).mean(0).tolist(), strict=True))
        bad = [name for name, value in means.items() if not np.isfinite(value)]
        if bad:
            raise self._not_finite(bad[0])
        self._log_update(means, clip_range, clip_range_vf)

    @contextmanager
    def _finite_outputs(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:  # torch's distributions refuse what is not finite
            if "invalid values" not in str(error):
                raise
            finite = all(bool(parameter.isfinite().all()) for parameter in self.policy.parameters())
            raise self._not_finite("what the policy computes" if finite else "a weight of the policy") from error

    def _not_finite(self, what: str) -> UserError:
        return UserError(
            f"{what} was not finite in the update after {self.num_timesteps} steps; the last checkpoint is whole: try a "
            "smaller learning rate, or look at the environment's rewards"
        )

    def _descend(self, loss: Tensor) -> Tensor:
        """One step of the optimiser; returns the norm of the gradient before it was clipped."""
        self.policy.optimizer.zero_grad()
        if loss.requires_grad:
            loss.backward()
        if self.fabric is not None:
            self._sum_gradients()
        norm = nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
        self.policy.optimizer.step()
        return norm.detach()

    def _sum_gradients(self) -> None:
        """Give every process the gradient of the whole minibatch, the sum of the processes' shares.

        DDP would take the mean, as if all shares were of the same size, and would wait for a process that has none.
        """
        parameters = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        reached = [parameter.grad is not None for parameter in parameters]
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        sums = self._summed(torch.cat([g.flatten() for g in own] + [torch.tensor(reached, device=self.device).float()]))
        *parts, reached_by = sums.split([*(p.numel() for p in parameters), len(parameters)])
        for parameter, part, processes in zip(parameters, parts, reached_by.tolist(), strict=True):
            parameter.grad = part.view_as(parameter) if processes else None

    def _loss(
        self, batch: Minibatch, clip_range: float, clip_range_vf: float | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """PPO's loss of a minibatch, and what is logged of it; steps that are not valid count nowhere.

        Of several processes each returns the loss of its share of the minibatch, which together are the minibatch's.
        """
        count, total = self._summed(torch.stack([batch.valid.sum(), (batch.advantages * batch.valid).sum()]))

        def mean(x: Tensor) -> Tensor:  # this process's share of it
            return (x * batch.valid).sum() / count.clamp(min=1)

        advantage = batch.advantages
        if self.normalize_advantage:
            centred = advantage - total / count.clamp(min=1)
            deviation = (self._summed((centred.square() * batch.valid).sum()) / (count - 1)).sqrt()
            advantage = torch.where(count > 1, centred / (deviation + 1e-8), advantage)  # as SB3: one has no deviation
        if not batch.valid.numel():  # all sequences of this minibatch are other processes'
            nothing = torch.zeros((), device=self.device)
            return nothing, self._told(dict.fromkeys(LOGGED, nothing))
        values, log_probs, entropy = self.policy.evaluate_actions(
            batch.observations, batch.actions, batch.state, batch.starts
        )
        log_ratio = log_probs - batch.log_probs
        ratio = log_ratio.exp()
        policy_loss = -mean(torch.min(advantage * ratio, advantage * ratio.clamp(1 - clip_range, 1 + clip_range)))
        if clip_range_vf is not None:
            values = batch.values + (values - batch.values).clamp(-clip_range_vf, clip_range_vf)
        value_loss = mean((batch.returns - values).square())
        entropy_loss = -mean(-log_probs if entropy is None else entropy)
        loss = policy_loss + self.ent_coef * entropy_loss + self.vf_coef * value_loss
        with torch.no_grad():
            told = {
                "loss": loss,
                "policy_gradient_loss": policy_loss,
                "value_loss": value_loss,
                "entropy_loss": entropy_loss,
                "approx_kl": mean((ratio - 1) - log_ratio),
                "clip_fraction": mean(((ratio - 1).abs() > clip_range).float()),
            }
        return loss, self._told(told)

    def _told(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is logged of a minibatch, of this process's share of it."""
        return dict(zip(LOGGED, self._summed(torch.stack([own[name].detach() for name in LOGGED])), strict=True))

    def _log_update(self, values: Mapping[str, float], clip_range: float, clip_range_vf: float | None) -> None:
        for name, value in values.items():
            self.logger.record(f"train/{name}", value)
        buffer = self.rollout_buffer
        values_of_all, returns, valid = self._of_all(buffer.values, buffer.returns, buffer.valid).cpu().numpy()
        variance = explained_variance(values_of_all[valid > 0], returns[valid > 0])
        if np.isfinite(variance):  # of returns that are all the same there is none
            self.logger.record("train/explained_variance", float(variance))
        if hasattr(self.policy, "log_std"):
            self.logger.record("train/std", self.policy.log_std.exp().mean().item())
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/clip_range", clip_range)
        if clip_range_vf is not None:
            self.logger.record("train/clip_range_vf", clip_range_vf)

    def predict(  # type: ignore[override]
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        """The policy's ``predict``: the action for an observation, and the state to hand in with the next one."""
        return self.policy.predict(observation, state, episode_start, deterministic)

    def initial_state(self, batch_size: int) -> State:
        """The policy's state at the start of an episode."""
        return self.policy.initial_state(batch_size)


def _largest_divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is at most so much."""
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)


def _on(part: Any, device: Any) -> Any:
    """A step, or a part of it, on a device."""
    if part is None or isinstance(part, Tensor):
        return part if part is None else part.to(device)
    if isinstance(part, Step):
        return Step(*(_on(one, device) for one in part))
    if isinstance(part, tuple):
        return tuple(_on(one, device) for one in part)
    return {name: _on(one, device) for name, one in part.items()}


def _put(room: Any, t: int, observation: Any) -> None:
    """Write observations into the rollout at a step."""
    if isinstance(room, dict):
        for name, part in room.items():
            part[t] = observation[name]
    else:
        room[t] = observation


def _sb3_step(env: VecEnv, actions: Tensor) -> tuple[Step, list[dict[str, Any]]]:
    """A step of an SB3 ``VecEnv``, which starts the next episode in the step that ends one."""
    observations, rewards, dones, infos = env.step(actions.cpu().numpy())
    truncated = np.array(
        [done and info.get("TimeLimit.truncated", False) for done, info in zip(dones, infos, strict=True)]
    )
    ended = torch.as_tensor(dones)
    cut = torch.as_tensor(truncated, dtype=torch.bool)
    final = None
    rows = cut.nonzero()[:, 0]
    if len(rows):
        last = stacked([infos[row]["terminal_observation"] for row in rows.tolist()])
        final = (rows, each(torch.as_tensor, last))
    seen = each(torch.as_tensor, observations)
    never = torch.zeros_like(ended)
    return Step(seen, torch.as_tensor(rewards).float(), ended & ~cut, cut, ended, never, None, final), infos
