"""Three claims about coordinates of SmolLM2, each recomputed on twenty scrambled twins.

Which ten residual coordinates behind block 15 matter for sentiment: by the difference of mean
activations, by attribution of a logit difference, and by the weights of a ridge probe. Chance is
what two random sets of ten share.
"""

import time

from common import parser_of, record, results_of

from signed_align import audit_claim
from signed_align.claims import TopAttribution, TopMeanDifference, TopWeights
from signed_align.demo.assets import movie_reviews, smollm2

HOOK = "blocks.15.hook_resid_post"
K = 10
TWINS = 20
REVIEWS = 40


def main() -> None:
    parser = parser_of(__doc__, "two twins")
    parser.add_argument("--twins", type=int, default=TWINS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.twins = 2
    ordered = sorted(movie_reviews(), key=lambda row: row.rating)
    negative = tuple(row.text for row in ordered[:REVIEWS])
    positive = tuple(row.text for row in ordered[-REVIEWS:])
    claims = {
        "mean difference": TopMeanDifference(HOOK, K, positive, negative),
        "attribution": TopAttribution(HOOK, K, positive + negative, (" great", " terrible")),
        "ridge probe": TopWeights(HOOK, K, positive, negative, "ridge"),
    }
    result = {"model": "SmolLM2-135M-Instruct", "hook": HOOK, "k": K, "twins": arguments.twins}
    for name, claim in claims.items():
        start = time.perf_counter()
        audit = audit_claim(smollm2(), claim, twins=arguments.twins)
        result[name] = {
            "size": audit.size,
            "chance": audit.chance,
            **{way: audit.mean(way) for way in ("as_stated", "true_gauge", "recovered_gauge")},
            "seconds": round(time.perf_counter() - start, 1),
        }
    record("audit", result, results_of(arguments))


if __name__ == "__main__":
    main()
