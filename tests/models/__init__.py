"""End-to-end tests: whole models compiled with `backend=\"ditron\"`."""
