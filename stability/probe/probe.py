"""One attention once more, on copies: what a shadow or the golden gives for a call of the run.

Nothing of it reaches the run: the inputs are detached copies, autograd records into a graph of its
own, the caller's autocast is off, random state is put back. Leaves out the comparison (`probe`).

The dual-attention probe: the primary decides the run, shadows and the golden only look.

At a probed step each attention call is repeated on the very same q, k and v, and compared forward
(out, LSE) and backward (dq, dk, dv under the run's own dout). Tensor hooks tell when dout and the
primary's gradients pass: the hook on out runs shadows and golden, so one layer's results live at a
time, and hooks on aliases of q, k and v take what the primary sends back. A hook returns nothing,
so nothing changes. The numbers stay on the device until `collect`, one transfer for all layers.

The deviation is always candidate minus baseline: its sign means the same in every arm, whichever of
the two is the primary. With gradient accumulation the first micro-batch of a step is looked at.
Leaves out when to look (`schedule`) and how calls are caught (`dual`, `intercept_*`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

from attention_kernels import MaskArguments, golden_attention
from stability.config.schema import ProbeConfig
from stability.probe.captured_call import AttentionCall, Pending, Primary
from stability.probe.measurements import Figures, Finding, Reading, Transfer
from stability.probe.schedule import Budget

__all__ = [
    "GRADIENTS",
    "AttentionProbe",
    "BadResultError",
    "BindMask",
    "WithLse",
    "isolated",
    "rerun",
    "rerun_golden",
]

GRADIENTS = ("dq", "dk", "dv")


class BadResultError(ValueError):
    """An attention returned something that is no result."""


WithLse = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""An attention of q, k and v with its mask bound, that returns out and the LSE, or None."""


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Leave the caller's random state and autocast as they were, and switch autocast off inside."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.autocast(device.type, enabled=False):
        yield


def rerun(
    attend: WithLse, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None
) -> dict[str, Tensor]:
    """Return `out`, `lse` if there is one, and with `dout` also `dq`, `dk` and `dv`.

    The gradients are those of autograd through `attend` under `dout`, in the inputs' dtype.
    BadResultError if what it returns has another shape or dtype than q, or no gradient.
    """
    leaves = [x.detach().clone().requires_grad_(dout is not None) for x in (q, k, v)]
    with isolated(q.device), torch.set_grad_enabled(dout is not None):
        out, lse = attend(*leaves)
        _check(out, q)
        results = {"out": out.detach()}
        if lse is not None:
            results["lse"] = lse.detach()
        if dout is not None:
            results |= _gradients(out, leaves, dout)
    return results


def rerun_golden(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskArguments, dout: Tensor | None = None
) -> dict[str, Tensor]:
    """Return what `rerun` does for the golden, everything in FP64."""
    leaves = [x.detach().double().requires_grad_(dout is not None) for x in (q, k, v)]
    with isolated(q.device), torch.set_grad_enabled(dout is not None):
        out, lse = golden_attention(*leaves, return_lse=True, **mask)
        results = {"out": out.detach(), "lse": lse}
        if dout is not None:
            results |= _gradients(out, leaves, dout.double())
    return results


def _gradients(out: Tensor, leaves: list[Tensor], dout: Tensor) -> dict[str, Tensor]:
    if not out.requires_grad:
        raise BadResultError("out carries no gradient")
    found = torch.autograd.grad(out, leaves, dout.detach().clone(), allow_unused=True)
    missing = [name for name, x in zip(GRADIENTS, found, strict=True) if x is None]
    if missing:
        raise BadResultError(f"no gradient reaches {missing[0].removeprefix('d')}")
    return dict(zip(GRADIENTS, found, strict=True))


def _check(out: object, q: Tensor) -> None:
    expected = f"{tuple(q.shape)} {q.dtype}"
    if not isinstance(out, Tensor):
        raise BadResultError(f"returned {type(out).__name__}, expected a tensor {expected}")
    if out.shape != q.shape or out.dtype != q.dtype:
        raise BadResultError(f"returned {tuple(out.shape)} {out.dtype}, expected {expected}")


BindMask = Callable[[AttentionCall, Primary], WithLse]
"""Gives an attention with the mask of a call bound; it may be the model's own, the primary."""


class AttentionProbe:
    """What the layers of one model share: shadows, golden, and the numbers of this step.

    `shadows` map names to attentions; the first is the one whose stream a second pass follows.
    `modules` are the model's modules by layer name, for the norms of W_Q.
    """

    def __init__(
        self,
        config: ProbeConfig,
        shadows: Mapping[str, BindMask],
        *,
        shadow_is_candidate: bool,
        modules: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self._config = config
        self._shadows = dict(shadows)
        self._shadow_is_candidate = shadow_is_candidate
        self._budget = Budget(config.overhead_share or 0.0)
        # the caller may fill it later: the model is built on the probe
        known = {} if modules is None else modules
        self._figures = Figures(config, list(shadows), known)
        self._pending: dict[str, Pending] = {}
        self._looking = self._again = self._repeated = False
        self._findings: list[Finding] = []
        self._reported: set[Finding] = set()

    @property
    def wants_second_pass(self) -> bool:
        """Whether the forward pass now running is to be repeated in the shadow's stream."""
        return self._looking and not self._repeated and bool(self._pending)

    def arm(self) -> None:
        """Look at the calls from now on: a step that is due begins."""
        self._looking, self._repeated = True, False
        self._budget.begin_step()

    def disarm(self) -> None:
        """Look no more; what was begun is finished by `start_transfer`."""
        self._looking = False

    def attend(self, call: AttentionCall, primary: Primary) -> Tensor:
        """Return the primary's result, untouched, and look at the call if it is to be looked at."""
        if self._again:
            return self._attend_again(call, primary)
        if not self._looking or not self._wants(call):
            return primary(call.q, call.k, call.v)
        qkv = [self._alias(x) for x in (call.q, call.k, call.v)]
        with_lse = getattr(primary, "with_lse", None)
        out, lse = with_lse(*qkv) if with_lse else (primary(*qkv), None)
        pending = self._pending[call.layer] = Pending.of(call, primary, qkv, out, lse)
        if self._config.backward and out.requires_grad:
            for name, x in zip(GRADIENTS, qkv, strict=True):
                if x.requires_grad:
                    x.register_hook(partial(self._take_gradient, pending, name))
            out.register_hook(partial(self._look, pending))
        elif not self._config.inherited:
            self._look(pending, None)
        return out

    @contextmanager
    def second_pass(self) -> Iterator[None]:
        """Inside, each call follows the first shadow and is compared with the pass before."""
        self._again = self._repeated = True
        try:
            yield
        finally:
            self._again = False

    def start_transfer(self) -> Transfer | None:
        """End the step: finish what no backward has reached, and send the numbers to the host."""
        for pending in self._pending.values():
            self._look(pending, None)
        self._pending.clear()
        findings = [
            found
            for found in (*self._findings, *self._figures.findings)
            if found not in self._reported
        ]
        self._reported.update(findings)
        self._findings.clear()
        self._figures.findings.clear()
        return self._figures.gathered.transfer(list(dict.fromkeys(findings)))

    def collect(self) -> Reading:
        """Return this step's figures, and forget them."""
        transfer = self.start_transfer()
        return transfer.result() if transfer else Reading({}, {}, ())

    def state_dict(self) -> dict[str, object]:
        """Return what a resume needs: the running sums, and the findings that were reported."""
        reported = sorted(tuple(finding) for finding in self._reported)
        return {"sums": self._figures.sums(), "reported": [list(pair) for pair in reported]}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from a checkpoint."""
        reported = state["reported"]
        assert isinstance(reported, list)
        self._reported = {Finding(*pair) for pair in reported}
        self._figures.set_sums(state["sums"])  # pyright: ignore[reportArgumentType]

    def _wants(self, call: AttentionCall) -> bool:
        if call.layer in self._pending:
            return False
        if not any(fnmatchcase(call.layer, pattern) for pattern in self._config.layers):
            return False
        if call.unsupported:
            self._findings.append(Finding(call.layer, f"not looked at: {call.unsupported}"))
            return False
        return self._budget.grants(call.layer)

    def _alias(self, x: Tensor) -> Tensor:
        """Return a view of x that has a gradient of its own: x may be used elsewhere too."""
        records = self._config.backward and torch.is_grad_enabled() and x.requires_grad
        return x.view_as(x) if records else x

    def _look(self, pending: Pending, dout: Tensor | None) -> None:
        """Run shadows and golden, and compare what is known by now."""
        if pending.seen:
            return
        pending.seen = True
        with torch.no_grad(), self._budget.spending(pending.out.device):
            if pending.was_overwritten():
                self._findings.append(Finding(pending.layer, "inputs or out overwritten in place"))
                return
            dout = None if dout is None else dout.detach().to(pending.out.dtype)
            for name, bind in self._shadows.items():
                run = partial(rerun, bind(pending.call, pending.primary))
                pending.shadows[name] = self._try(name, run, pending, dout)
            if self._config.golden:
                run = partial(rerun_golden, mask=pending.call.mask)
                pending.golden = self._try("golden", run, pending, dout)
            self._compare(pending, "out", pending.out)
            self._compare_lse(pending)
            if self._config.inside:
                with isolated(pending.out.device):
                    self._figures.look_inside(pending, dout, self._candidate(pending))
            pending.forget_forward()

    def _take_gradient(self, pending: Pending, name: str, gradient: Tensor) -> None:
        with torch.no_grad(), self._budget.spending(gradient.device):
            self._compare(pending, name, gradient.detach())
            pending.forget(name)

    def _try(self, name: str, run: partial, pending: Pending, dout: Tensor | None) -> dict:
        """Return what `run` gives, nothing and a finding if it fails: a run must not die of it."""
        try:
            return run(*pending.qkv, dout=dout)
        except torch.AcceleratorError:
            raise  # the device is lost
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            self._findings.append(
                Finding(pending.layer, f"{name}: {type(error).__name__}: {text[0]}")
            )
            return {}

    def _compare(self, pending: Pending, what: str, primary: Tensor) -> None:
        for name, results in pending.shadows.items():
            mine = results.get(what)
            if mine is None:
                continue
            pair = (mine, primary) if self._shadow_is_candidate else (primary, mine)
            self._figures.compare(pending, what, *pair, pending.golden.get(what), name)

    def _compare_lse(self, pending: Pending) -> None:
        """Compare LSEs; one that the baseline does not give is measured against the golden's."""
        if pending.lse is not None:
            self._compare(pending, "lse", pending.lse)
            return
        golden = pending.golden.get("lse")
        for name, results in pending.shadows.items() if self._shadow_is_candidate else ():
            mine = results.get("lse")
            if mine is not None and golden is not None:
                self._figures.compare_to_golden(pending, mine, golden, name)

    def _candidate(self, pending: Pending) -> Tensor | None:
        """Return the candidate's out."""
        if not self._shadow_is_candidate:
            return pending.out
        return pending.shadows[next(iter(self._shadows))].get("out")

    def _attend_again(self, call: AttentionCall, primary: Primary) -> Tensor:
        """Attend as the first shadow on its own stream; compare with the layer's first pass."""
        name, bind = next(iter(self._shadows.items()))
        attend = partial(rerun, bind(call, primary))
        again = Pending.of(call, primary, [call.q, call.k, call.v], call.q, None)
        own = None if call.unsupported else self._try(name, attend, again, None).get("out")
        if own is None:
            return primary(call.q, call.k, call.v)
        held = self._pending.get(call.layer)
        if held is not None and not held.was_overwritten():
            if self._shadow_is_candidate:
                there = self._try(name, attend, held, None).get("out")
                pairs = {"total": (own, held.out), "carried": (own, there)}
            else:
                there = primary(call.q, call.k, call.v)
                pairs = {"total": (held.out, own), "carried": (held.out, there)}
            for what, (x, reference) in pairs.items():
                if reference is not None:
                    self._figures.compare(held, what, x, reference, None, name)
        return own
