"""mergekit recipes that run as they stand on what `signed-align demo` leaves in demo-out."""
