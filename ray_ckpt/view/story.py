"""A run told in sentences: one event of the journal, one line."""

from __future__ import annotations

from typing import Any

from ray_ckpt.view.human import human_bytes, human_duration, shorten


def tell(event: dict[str, Any]) -> str | None:
    """The line for an event; None for events that are not worth one."""
    teller = TELLERS.get(str(event.get("event")))
    if teller is None:
        return None
    # A cause may be a whole traceback, and a log with a line an event is read line by line.
    return " ".join(filter(None, map(str.strip, teller(event).splitlines()))) or None


def _tracker(e: dict[str, Any]) -> str:
    known = e["events_read"]
    what = f"knows the run from {known} lines of its journal" if known else "the run is new"
    return f"tracker started on {e['host']} (pid {e['pid']}): {what}"


def _attempt(e: dict[str, Any]) -> str:
    return f"attempt {e['generation']} starts with {_workers(e['world_size'])}"


def _group(e: dict[str, Any]) -> str:
    took = human_duration(e["asked_ago_s"])
    # Less than that is how long the cluster takes to look.
    waited = f", after {human_duration(e['waited_s'])} without room" if e["waited_s"] >= 10 else ""
    ready = f", {e['spares']} of them in spare processes" if e.get("spares") else ""
    return f"{_workers(e['world_size'])} up {took} after they were asked for{ready}{waited}"


def _restored(e: dict[str, Any]) -> str:
    if not e["source"]:
        return f"attempt {e['generation']} begins at step 0: {e['reason']}"
    more = int(e.get("lost_steps_more", 0))
    return (
        f"attempt {e['generation']} resumes at step {e['step']} from {e['source']} "
        f"in {human_duration(e['seconds'])}: {e['reason']}"
        + (f"; {_steps(more)} more to do again" if more > 0 else "")
    )


def _decision(e: dict[str, Any]) -> str:
    return f"save every {_steps(e['every_steps'])}: {e['reason']}"


def _tier_decision(e: dict[str, Any]) -> str:
    return f"copies to slower tiers: {'; '.join(e['reasons'])}"


def _commit(e: dict[str, Any]) -> str:
    tier = e.get("tier", "durable")
    where = "" if tier == "durable" else f" in {tier}"
    return (
        f"committed {e['name']}{where}: {human_bytes(e['bytes'])} in {e['files']} files, stall "
        f"{human_duration(e['stall_s'])}, upload {human_duration(e['upload_s'])}" + _validation(e)
    )


def _replicated(e: dict[str, Any]) -> str:
    if e["copies"] < e["wanted"] and not e.get("first", True):
        return ""  # told once in an attempt; there are not more nodes
    few = "" if e["copies"] >= e["wanted"] else f" ({e['wanted']} are wanted: too few nodes)"
    return (
        f"{e['name']} was read back in {e['tier']}, and has {e['copies']} "
        f"{'copy' if e['copies'] == 1 else 'copies'} there{few}: {human_bytes(e['bytes'])} moved in "
        f"{human_duration(e['seconds'])}"
    )


def _promote(e: dict[str, Any]) -> str:
    tries = "" if e["tries"] == 1 else f", in {e['tries']} tries"
    return (
        f"{e['name']} is in {e['tier']} too: {human_bytes(e['bytes'])} copied and compared in "
        f"{human_duration(e['seconds'])}{tries}"
    )


def _promote_failed(e: dict[str, Any]) -> str:
    return (
        f"{e['name']} DID NOT GET TO {e['tier']} in {e['tries']} tries, the next one that is due is tried: "
        f"{e['error']}"
    )


def _bad_copy(e: dict[str, Any]) -> str:
    return f"BAD COPY of {e['name']} in {e['tier']} on node {e['node'][:12]}: {e['path']} is not as written"


def _validation(e: dict[str, Any]) -> str:
    if e.get("validation_loss") is None or e.get("validation_s") is None:
        return ""
    return f", validation loss {e['validation_loss']:.4f} in {human_duration(e['validation_s'])}"


def _save_failed(e: dict[str, Any]) -> str:
    return f"SAVE FAILED at step {e['step']}, training goes on and tries again: {e['error']}"


def _quarantine(e: dict[str, Any]) -> str:
    if e.get("by") == "guard":
        return (
            f"QUARANTINED {e['name']}, it is kept to be looked at and not committed: {e['reason']} "
            f"(loss {e.get('loss')})"
        )
    return f"QUARANTINED {e['name']}, it will not be restored: {e['reason']}"


def _trouble(e: dict[str, Any]) -> str:
    return f"NOT FINITE: {e['reason']}"


def _skipped(e: dict[str, Any]) -> str:
    return f"{e['name']} cannot be read just now and is passed over: {e['reason']}"


def _interruption(e: dict[str, Any]) -> str:
    return (
        f"attempt {e['generation']} ended at step {e['step']} ({e['kind']}: {shorten(str(e['cause']))}); "
        f"{_steps(e['lost_steps'])} to do again"
    )


def _hang(e: dict[str, Any]) -> str:
    files = f"; what each rank was doing is in {e['dumps']}" if e["dumps"] else ""
    return f"HANG: {e['reason']}{files}"


def _crash_loop(e: dict[str, Any]) -> str:
    return f"CRASH LOOP ({e['action']}): {e['reason']}"


def _excluded(e: dict[str, Any]) -> str:
    if not e["nodes"]:
        return "no node is left out any more"
    nodes = (f"{name} ({times} hangs)" for name, times in zip(e["names"], e["times"], strict=True))
    return f"EXCLUDED, as suspected too often: no workers on node {', '.join(nodes)}"


def _straggler(e: dict[str, Any]) -> str:
    return (
        f"STRAGGLER: rank {e['rank']} on node {e['node'][:12]} takes {e['factor']:.2f} times as long for a forward "
        f"pass as the others ({human_duration(e['pace_s'])} and {human_duration(e['others_s'])}), at {e['saves']} "
        "saves in a row"
    )


def _straggler_over(e: dict[str, Any]) -> str:
    return f"node {e['node'][:12]} is no straggler any more ({e['factor']:.2f} times the time of the others)"


def _save_requested(e: dict[str, Any]) -> str:
    return f"a save at the next step was asked for: {e['reason']}"


def _stop_requested(e: dict[str, Any]) -> str:
    return f"a save and the end of the job were asked for: {e['reason']}"


def _drain_notice(e: dict[str, Any]) -> str:
    when = "" if e["left_s"] is None else f" in {human_duration(max(0.0, e['left_s']))}"
    return f"node {e['name']} will be taken away{when}"


def _leave_requested(e: dict[str, Any]) -> str:
    what = "save and leave" if e["saves"] else "LEAVE WITHOUT A SAVE"
    why = "" if e["reason"] == e["cause"] else f": {e['reason']}"
    return f"the workers {what} ({e['cause']}){why}"


def _left(e: dict[str, Any]) -> str:
    return f"step {e['step']} is safe: the workers leave"


def _resize_decision(e: dict[str, Any]) -> str:
    what = (
        f"goes to {_workers(e['workers'])}" if e["why"] in ("grow", "shrink") else "does not grow"
    )
    return f"the cluster has room for {_workers(e['possible'])}, the run {what}: {e['reason']}"


def _segment(e: dict[str, Any]) -> str:
    changed = "; ".join(f"{k} {v['old']} -> {v['new']}" for k, v in e["changed"].items())
    return (
        f"segment {e['number']} starts at step {e['step']}, sample {e['sample_offset']} ({e['reason']}): "
        f"{e['cause']}" + (f"; {changed}" if changed else "")
    )


def _alert(e: dict[str, Any]) -> str:
    return f"ALERT {e['name']}: {e['problem']}"


def _verified(e: dict[str, Any]) -> str:
    return f"read {e['name']} back in {human_duration(e['seconds'])}: every byte is as written"


def _drill(e: dict[str, Any]) -> str:
    took = human_duration(e["seconds"])
    if not e["ok"]:
        return f"DRILL FAILED: {e['name']} was not restored to what it was: {e['problems'][0]}"
    if e.get("expected") is None or e.get("loss") is None:
        return f"drilled {e['name']}: restored in {took} on {e['host']}, no loss compared"
    same = "the same bits as" if e["same_bits"] else f"{e['difference']:.2g} from that"
    return f"drilled {e['name']}: restored in {took} on {e['host']}, loss {e['loss']:.4f}, {same} at its commit"


def _delete(e: dict[str, Any]) -> str:
    where = f" from {e['tier']}" if "tier" in e else ""
    return f"deleted {e['name']}{where}: {e['reason']}"


def _delete_failed(e: dict[str, Any]) -> str:
    return (
        f"{e['name']} could not be deleted, which is tried again after the next save: {e['error']}"
    )


def _keep(e: dict[str, Any]) -> str:
    return f"{e['name']} is kept once it is in the durable tier: {e['reason']}"


def _pin(e: dict[str, Any]) -> str:
    return f"{e['name']} is pinned by {e['author']}: {e['reason']}"


def _unpin(e: dict[str, Any]) -> str:
    return f"{e['name']} is no longer pinned by {e['author']}: {e['reason']}"


def _finished(e: dict[str, Any]) -> str:
    return f"finished at step {e['step']}"


TELLERS = {
    "tracker_started": _tracker,
    "group_started": _group,
    "attempt_started": _attempt,
    "restored": _restored,
    "decision": _decision,
    "tier_decision": _tier_decision,
    "commit": _commit,
    "replicated": _replicated,
    "promote": _promote,
    "promote_failed": _promote_failed,
    "bad_copy": _bad_copy,
    "save_failed": _save_failed,
    "save_requested": _save_requested,
    "stop_requested": _stop_requested,
    "drain_notice": _drain_notice,
    "leave_requested": _leave_requested,
    "left": _left,
    "resize_decision": _resize_decision,
    "quarantine": _quarantine,
    "trouble": _trouble,
    "skipped": _skipped,
    "interruption": _interruption,
    "hang": _hang,
    "excluded": _excluded,
    "straggler": _straggler,
    "straggler_over": _straggler_over,
    "crash_loop": _crash_loop,
    "segment": _segment,
    "alert": _alert,
    "verified": _verified,
    "drill": _drill,
    "delete": _delete,
    "delete_failed": _delete_failed,
    "keep": _keep,
    "pin": _pin,
    "unpin": _unpin,
    "finished": _finished,
}


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"
