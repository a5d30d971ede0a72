"""What a log tells: milestones reached, first cause, boundary, verdict, advice."""
