"""How often, and with which pauses, a call to a storage that may fail is tried again."""

from __future__ import annotations

import re
from dataclasses import dataclass

# What stores say when keys are expired or refused. A HEAD request has no body to say it in: 400 is all there is.
_REFUSED = re.compile(
    r"ExpiredToken|TokenRefreshRequired|InvalidToken|InvalidAccessKeyId|SignatureDoesNotMatch|AccessDenied"
    r"|EXPIRED_TOKEN|INVALID_ACCESS_KEY_ID|INVALID_CLIENT_TOKEN_ID|SIGNATURE_DOES_NOT_MATCH|ACCESS_DENIED"
    r"|MISSING_AUTHENTICATION_TOKEN|UNRECOGNIZED_CLIENT|REQUEST_EXPIRED|NOT_AUTHORIZED"
    r"|AuthenticationFailed|AuthorizationFailure|Unauthenticated|UNAUTHENTICATED|PermissionDenied|PERMISSION_DENIED"
    r"|HTTP status 40[13]\b|HTTP status 400\) during HeadObject|\b40[13] (?:Unauthorized|Forbidden)|invalid_grant"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryRule:
    """When a call that failed is tried again.

    Attributes:
        tries: of one call, the first included.
        first_pause_s: pause after the first failure, seconds; each further one is twice as long.
        longest_pause_s: but no longer than this.
        absent_pause_s: pause before "not found" is asked for a second time.
        timeout_s: how long one request may go without a byte.
    """

    tries: int = 8
    first_pause_s: float = 0.5
    longest_pause_s: float = 20.0
    absent_pause_s: float = 0.5
    timeout_s: float = 20.0

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise ValueError(f"tries {self.tries}: must be at least 1")
        for name in ("first_pause_s", "longest_pause_s", "absent_pause_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} {getattr(self, name)}: must be 0 or more seconds")
        if not 0 < self.timeout_s < float("inf"):
            raise ValueError(f"timeout_s {self.timeout_s}: must be more than 0 seconds, and finite")

    def pause_s(self, failures: int, chance: float) -> float:
        """How long to wait after so many failures of one call, seconds.

        Args:
            failures: 1 or more.
            chance: 0 to 1; takes up to half of the pause away, so that many who failed at once do not come back
                at once.
        """
        longest = min(self.longest_pause_s, self.first_pause_s * 2.0 ** min(failures - 1, 60))
        return longest * (1.0 - 0.5 * chance)


def refused(error: BaseException) -> bool:
    """Whether a store did not accept the keys, which new ones may mend."""
    return bool(_REFUSED.search(str(error)))
