"""The page of checkpoints in Ray's dashboard: how it gets in there, and how runs tell it that they are there.

Ray's dashboard loads every module below ``ray.dashboard.modules`` into its own process, and its modules add routes to
its own port. There is no public way in, so ``ray-ckpt dashboard enable`` puts a small file there that does nothing but
to import :mod:`ray_ckpt.view.head_module`, and does without when that fails: whatever becomes of this package, the
dashboard starts. It takes effect when a Ray is started after that.

Runs register in the key-value store of the cluster, so they are known as long as this Ray lives.

Read in Ray 2.60.0, like :mod:`ray_ckpt.ray_private`. Nothing here imports Ray before it is needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_ckpt.errors import ConfigError, StorageError

logger = logging.getLogger(__name__)

READ_IN = "2.60.0"
VARIABLE = "RAY_CKPT_DASHBOARD"  # "0": no page in the Rays that are started here
SHIM_FOLDER = "ray_ckpt_checkpoints"
PAGE_PATH = "/checkpoints"
SIGN_IN_PATH = "/static/ray_ckpt/checkpoints"  # asks for the token, and leads to the page

_NAMESPACE = b"ray_ckpt"
_PREFIX = b"run:"
_PAGE = b"page"
_ASK_S = 5.0

_SHIM = '''"""Put here by `ray-ckpt dashboard enable`; `ray-ckpt dashboard disable` takes it away.

Made for Ray {read_in}. Adds the page /checkpoints to the dashboard, which goes on without whatever is wrong with it.
"""

import logging

try:
    import ray_ckpt.view.head_module
except (Exception, SystemExit) as error:
    logging.getLogger(__name__).warning(
        "no page /checkpoints: ray_ckpt cannot be loaded (%s: %s); `ray-ckpt dashboard disable` ends this message",
        type(error).__name__,
        error,
    )
'''


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """Whether the page is in a Ray installation.

    Attributes:
        folder: where its file is, or would be; None when there is no dashboard here.
        enabled: whether it is there, as this version of the package would write it.
        outdated: whether another version wrote what is there.
        ray_version: of the installation; empty when it is not to be found.
    """

    folder: Path | None
    enabled: bool
    outdated: bool
    ray_version: str

    @property
    def words(self) -> str:
        """The same in a sentence."""
        if self.folder is None:
            return "this Python has no Ray with a dashboard (pip install 'ray[default]')"
        note = ""
        if self.ray_version != READ_IN:
            note = f" (Ray {self.ray_version}; the page was made for {READ_IN} and may be missing)"
        if self.outdated:
            return f"enabled by another version of ray_ckpt, enable it again: {self.folder}{note}"
        return f"{'enabled' if self.enabled else 'disabled'}: {self.folder}{note}"


def status() -> Installed:
    """Looks whether the page is in the Ray of this Python."""
    modules, version = _modules()
    if modules is None:
        return Installed(folder=None, enabled=False, outdated=False, ray_version=version)
    folder = modules / SHIM_FOLDER
    try:
        found: str | None = (folder / "__init__.py").read_text()
    except OSError:
        found = None
    return Installed(
        folder=folder,
        enabled=found == _shim(),
        outdated=found is not None and found != _shim(),
        ray_version=version,
    )


def enable() -> Installed:
    """Puts the page into the Ray of this Python; Rays that are started from now on have it. Twice is once.

    Raises:
        ConfigError: there is no dashboard, or its folder cannot be written.
    """
    now = status()
    if now.folder is None:
        raise ConfigError(f"{now.words}. Nothing was changed.")
    if now.enabled:
        return now
    path = now.folder / "__init__.py"
    draft = now.folder / f".{secrets.token_hex(4)}.draft"
    try:
        now.folder.mkdir(exist_ok=True)
        draft.write_text(_shim())
        draft.replace(path)  # a dashboard that starts just now sees all of it or nothing
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
            now.folder.rmdir()
        raise ConfigError(
            f"{now.folder} cannot be written ({error.strerror}): the page goes into the Ray of this Python. Use a "
            "Python environment that you may write to, or ask whoever looks after this one to run: ray-ckpt "
            "dashboard enable"
        ) from error
    return status()


def disable() -> Installed:
    """Takes the page away; a Ray that runs keeps it until it ends. Twice is once.

    Raises:
        ConfigError: its folder cannot be written.
    """
    now = status()
    if now.folder is None or not now.folder.exists():
        return now
    try:
        shutil.rmtree(now.folder)
    except OSError as error:
        raise ConfigError(f"{now.folder} cannot be deleted ({error.strerror})") from error
    return status()


def enable_if_possible() -> bool:
    """For a Ray that is about to be started here: whether it will have the page. Never an error."""
    if os.environ.get(VARIABLE, "1") == "0":
        return False
    try:
        return enable().enabled
    except ConfigError as error:
        logger.info("no page of checkpoints in the dashboard: %s", error)
        return False


def register_run(record: Mapping[str, Any]) -> None:
    """Tells the dashboard of this Ray of a run; a run that cannot be registered is only not shown.

    Args:
        record: ``run``, ``run_dir``, ``remote``, ``actor``, ``registered_at``; plain values, no secrets.
    """
    try:
        from ray.experimental.internal_kv import _internal_kv_initialized, _internal_kv_put

        if _internal_kv_initialized():
            key = hashlib.sha256(str(record["run_dir"]).encode()).hexdigest().encode()
            _internal_kv_put(
                _PREFIX + key,
                json.dumps(dict(record)).encode(),
                overwrite=True,
                namespace=_NAMESPACE,
            )
    except Exception:
        # Whoever looks on must not stop a run.
        logger.warning("run %r is not shown in the dashboard", record.get("run"), exc_info=True)


def asks_for_token() -> bool:
    """Whether the dashboard in whose process this is lets nobody in without the token of its cluster."""
    try:
        from ray._private.authentication.authentication_utils import is_token_auth_enabled

        return bool(is_token_auth_enabled())
    except (ImportError, AttributeError) as error:
        logger.warning("whether this Ray asks for a token is not known (%s)", error)
        return False


def tell_page(client: Any, path: str) -> None:
    """Tells jobs of this Ray where its dashboard has the page.

    Args:
        client: to the store of the cluster, such as ``DashboardHeadModule.gcs_client``.
        path: of the address that people are to open.
    """
    client.internal_kv_put(_PAGE, path.encode(), True, _NAMESPACE, timeout=_ASK_S)


def page_path() -> str:
    """Where the dashboard of the Ray of this job has the page, for its log; empty when it has none."""
    try:
        from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_initialized

        if _internal_kv_initialized():
            return (_internal_kv_get(_PAGE, namespace=_NAMESPACE) or b"").decode()
    except Exception:
        # Whoever looks on must not stop a run.
        logger.warning(
            "where the dashboard has the page of checkpoints is not known", exc_info=True
        )
    return ""


def registered_runs(client: Any) -> list[dict[str, Any]]:
    """The records of all runs of this Ray.

    Args:
        client: to the store of the cluster, such as ``DashboardHeadModule.gcs_client``.

    Raises:
        StorageError: the cluster does not answer.
    """
    try:
        keys = client.internal_kv_keys(_PREFIX, _NAMESPACE, timeout=_ASK_S)
        values = [client.internal_kv_get(key, _NAMESPACE, timeout=_ASK_S) for key in keys]
    except Exception as error:  # of Ray's own, and not a class that is public
        raise StorageError(
            f"the runs of this Ray cannot be asked for ({type(error).__name__})"
        ) from error
    found = []
    for value in values:
        with contextlib.suppress(ValueError, TypeError):
            record = json.loads(value)
            if isinstance(record, dict):
                found.append(record)
    return found


def _shim() -> str:
    return _SHIM.format(read_in=READ_IN)


def _modules() -> tuple[Path | None, str]:
    """The folder of the dashboard's modules, and the version of Ray; without importing it."""
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:
        return None, ""
    root = Path(spec.origin).parent
    modules = root / "dashboard" / "modules"
    return (modules if (modules / "__init__.py").is_file() else None), _version(root)


def _version(root: Path) -> str:
    try:
        text = (root / "_version.py").read_text()
    except OSError:
        return ""
    line = next((line for line in text.splitlines() if line.startswith("version")), "")
    return line.partition("=")[2].strip().strip("\"'")
