//! Errors in the words of the tools: an action has parameters that its tool names differently.

use box_protocol::BoxError;

/// Names the argument of a tool instead of the parameter of an action, by pairs of parameter and argument.
pub(super) fn rename(error: impl Into<BoxError>, names: &[(&str, &str)]) -> BoxError {
    let error = error.into();
    let renamed = names.iter().find_map(|(parameter, argument)| {
        let problem = error.message().strip_prefix(parameter)?;
        Some(format!("{argument}: {}", problem.strip_prefix(": ")?))
    });
    match renamed {
        Some(message) => BoxError::new(error.code(), message),
        None => error,
    }
}

/// Replaces the problem with an argument, if the error names this parameter.
pub(super) fn reword(error: BoxError, parameter: &str, message: &str) -> BoxError {
    let problem = error.message().strip_prefix(parameter);
    if problem.is_some_and(|problem| problem.starts_with(": ")) {
        return BoxError::new(error.code(), message);
    }
    error
}
