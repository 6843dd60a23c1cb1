"""Video prediction: frames → tokens → core → slots → the next frame.

Goyal et al. 2020, "Factorizing Declarative and Procedural Knowledge in Structured, Dynamical Environments" (SCOFF),
sections 4 and 5, with the encoder and decoder of van Steenkiste et al. 2018, "Relational Neural Expectation Maximization"
(R-NEM), for every core.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..core import RecurrentCore, State, Tokens, unroll
from ..decoders import JointDecoder, SlotDecoder
from ..encoders import FrameEncoder

MODELS = ("frames", "op3")
DECODERS = ("joint", "slots", "broadcast")
READOUTS = ("attention", "concatenated")


class VideoModel(nn.Module):
    """Reads frames one after another, and says after each what the next one will be.

    Frames are floats in [0, 1], ``(T, B, C, H, W)``; what is said of a pixel is the logit of its being lit.

    Args:
        core: a core with a state, for the encoder's tokens.
        encoder: of as many channels as ``stack`` frames have.
        decoder: of the core's slots.
        stack: frames that are seen at a step, the latest last; black before the first.
    """

    def __init__(self, core: RecurrentCore, encoder: FrameEncoder, decoder: JointDecoder | SlotDecoder, *, stack: int):
        super().__init__()
        self.core: RecurrentCore
        self.encoder, self.core, self.decoder, self.stack = encoder, core, decoder, stack
        self.token_shape = encoder.num_tokens, encoder.token_size

    def tokens(self, frames: Tensor, before: Tensor | None = None) -> Tokens:
        """What the core reads, ``(T, B, N, F)``.

        Args:
            frames: ``(T, B, C, H, W)``.
            before: the ``stack - 1`` frames before them; None if they are the first.
        """
        if self.stack > 1:
            if before is None:
                before = frames.new_zeros(self.stack - 1, *frames.shape[1:])
            whole = torch.cat([before, frames])
            frames = torch.cat([whole[i : i + len(frames)] for i in range(self.stack)], dim=2)
        return Tokens(self.encoder(frames.flatten(0, 1)).unflatten(0, frames.shape[:2]))

    def initial_state(self, batch_size: int, num_slots: int | None = None) -> State:
        """The core's first state, or one with more object files than it has.

        Files beyond the core's own begin as draws from the normal distribution that has the mean and spread of the learned
        first states; always the same ones.

        Args:
            batch_size: B.
            num_slots: K; None for the core's.
        """
        core = self.core
        if num_slots is None or num_slots <= core.num_slots:
            return core.initial_state(batch_size)
        learned = core.initial_state(1)["hidden"][0]
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(num_slots - len(learned), core.slot_size, generator=generator).to(learned)
        more = learned.mean(0) + learned.std(0) * drawn
        return core.initial_state(batch_size, torch.cat([learned, more]).expand(batch_size, -1, -1))

    def observe(self, frames: Tensor, state: State | None = None, before: Tensor | None = None) -> tuple[Tensor, State]:
        """The slots after every frame, ``(T, B, K, D)``, and the last state; see ``tokens``."""
        if state is None:
            state = self.initial_state(frames.shape[1])
        return unroll(self.core, self.tokens(frames, before), state)

    def say(self, slots: Tensor) -> Tensor:
        """Logits of the frames ``(..., C, H, W)`` that slots ``(..., K, D)`` say will come next."""
        logits: Tensor = self.decoder(slots.flatten(0, -3))
        return logits.unflatten(0, slots.shape[:-2])

    def forward(self, frames: Tensor) -> Tensor:
        """Logits of the frame after each of ``frames (T, B, C, H, W)``, of the same shape."""
        return self.say(self.observe(frames)[0])

    @torch.no_grad()
    def rollout(self, prompt: Tensor, steps: int, *, num_slots: int | None = None) -> tuple[Tensor, Tensor]:
        """Go on from true frames, then seeing only what it said itself: the probabilities of pixels.

        Args:
            prompt: ``(T, B, C, H, W)``.
            steps: S, frames to say.
            num_slots: see ``initial_state``.

        Returns:
            The frames ``(S, B, C, H, W)``, and the slots from which each was said, ``(S, B, K, D)``.
        """
        slots, state = self.observe(prompt, self.initial_state(prompt.shape[1], num_slots))
        latest = slots[-1]
        black = prompt.new_zeros(self.stack - 1, *prompt.shape[1:])
        before = torch.cat([black, prompt])[len(prompt) :]  # the last stack - 1 frames
        said, held = [], []
        for step in range(steps):
            frame = self.say(latest).sigmoid()[None]
            said.append(frame[0])
            held.append(latest)
            if step + 1 < steps:
                slots, state = self.observe(frame, state, before)
                latest, before = slots[-1], torch.cat([before, frame])[1:]
        return torch.stack(said), torch.stack(held)


def video_model(
    core: Callable[..., RecurrentCore],
    frame_shape: tuple[int, int, int],
    *,
    tokens: str,
    decoder: str,
    readout: str,
    channels: int,
    hidden_size: int,
    stack: int,
) -> VideoModel:
    """The model around a core, which without other sizes has four slots of 100, SCOFF's.

    Args:
        core: makes the core in the sizes it is given.
        frame_shape: ``(C, H, W)``.
        tokens: what the core reads of a frame, "positions" or "vector", see ``FrameEncoder``.
        decoder: "joint", a frame of all slots together, or "slots", a mask and colours of each; "broadcast" for the same by
            a ``BroadcastDecoder``.
        readout: of the joint decoder: "attention", or slots "concatenated", for cores whose slots are not of a kind.
        channels: of the last convolution.
        hidden_size: of the linear layers around the core.
        stack: frames seen at a step.

    Raises:
        UserError: frames of other sizes than 16, 32, 64 or 128.
    """
    seen = (stack * frame_shape[0], *frame_shape[1:])
    encoder = FrameEncoder(seen, tokens=tokens, channels=channels, vector_size=hidden_size)
    built = core(encoder.token_size, num_tokens=encoder.num_tokens, num_slots=4, slot_size=100)
    sizes = {"channels": channels, "hidden_size": hidden_size}
    if decoder != "joint":
        slots = SlotDecoder(built.slot_size, frame_shape, **sizes, broadcast=decoder == "broadcast")
        return VideoModel(built, encoder, slots, stack=stack)
    exchangeable = readout == "attention"
    joint = JointDecoder(built.num_slots, built.slot_size, frame_shape, exchangeable=exchangeable, **sizes)
    return VideoModel(built, encoder, joint, stack=stack)
