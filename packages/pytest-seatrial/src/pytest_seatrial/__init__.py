"""pytest plugins: tracked metrics, test groups and selection of tests. Needs pytest alone."""
