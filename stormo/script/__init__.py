"""What a user's own training loop needs: `stormo.World` joins the workers, shares batches, reduces, saves and loads."""
