"""What several tests share: a module for each concern. Some are scripts that tests run."""
