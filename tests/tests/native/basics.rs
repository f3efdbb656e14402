//! Commands, their output and their ends.

use super::support::{on_each_machine, printed};

#[tokio::test]
async fn a_command_runs_and_its_output_comes_back() {
    on_each_machine(async |machine| {
        let result = machine.exec("simple", "echo hello-box; echo oops >&2").await;
        assert_eq!(printed(&result), "hello-box");
        assert_eq!(result.stderr, "oops\n");
        assert_eq!(result.backend_name, "native");
    })
    .await;
}
