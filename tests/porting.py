"""Porting as a user does who knows which model an artifact was made on."""

from signed_align import port as port_artifact


def port(artifact, gauge, out, **options):
    """``port`` with the model that artifacts were made on which do not name one themselves."""
    start = gauge.target if options.get("inverse") else gauge.source
    return port_artifact(
        artifact, gauge, out, **{"made_on": start.name if start else None, **options}
    )
