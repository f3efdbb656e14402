//! Actions: their types, their handlers and the router that joins the two.

use std::any::TypeId;
use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::call::{Call, Dispatch};
use crate::error::RpcError;
use crate::idempotency::IdempotencyStore;

/// One action that a peer can call.
///
/// `Params`, `Result` and `Chunk` must serialize to JSON objects (structs with named fields, or [`Empty`]), because
/// not every codec supports other values.
pub trait Action: Send + Sync + 'static {
    /// Name on the wire.
    const NAME: &'static str;
    /// Parameters of the call.
    type Params: Serialize + DeserializeOwned + Send + Sync + 'static;
    /// Result, which ends the call.
    type Result: Serialize + DeserializeOwned + Send + Sync + 'static;
    /// Chunk of a stream before the result; [`Never`] if it does not stream.
    type Chunk: Serialize + DeserializeOwned + Send + Sync + 'static;
}

/// Whether the action can stream.
pub(crate) fn streams<A: Action>() -> bool {
    TypeId::of::<A::Chunk>() != TypeId::of::<Never>()
}

/// Chunk of an action that does not stream. It has no values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Never {}

/// Parameters or a result without members: `{}`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Empty {}

/// Handler of one action.
///
/// The task that reads the connection polls the future first, so that calls start in the order of sending. It must not
/// block. The engine drops it when the caller cancels, when its deadline passes or when the connection breaks. The
/// values it holds must clean up in `drop`.
pub trait Handle<A: Action>: Send + Sync + 'static {
    /// Answers one call.
    fn handle(
        &self,
        params: A::Params,
        call: Call<A>,
    ) -> impl Future<Output = Result<A::Result, RpcError>> + Send;
}

pub(crate) type HandlerFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Handler of one action in a router.
pub(crate) struct Entry {
    pub(crate) name: &'static str,
    pub(crate) streams: bool,
    start: Box<dyn Fn(Dispatch) -> HandlerFuture + Send + Sync>,
}

impl Entry {
    pub(crate) fn start(&self, dispatch: Dispatch) -> HandlerFuture {
        (self.start)(dispatch)
    }
}

/// Actions that one end of a connection serves. Cheap to clone.
/// One router serves all connections of a server, and remembers idempotency keys across them.
#[derive(Clone)]
pub struct Router(Arc<Inner>);

struct Inner {
    entries: HashMap<&'static str, Arc<Entry>>,
    idempotency: Arc<IdempotencyStore>,
}

impl Router {
    /// Creates a router without actions, for an end that only calls.
    pub fn empty() -> Self {
        RouterBuilder::new(Arc::new(())).build()
    }

    /// Starts a router with the handlers of `state`.
    pub fn builder<S: Send + Sync + 'static>(state: Arc<S>) -> RouterBuilder<S> {
        RouterBuilder::new(state)
    }

    pub(crate) fn find(&self, action: &str) -> Option<&Entry> {
        self.0.entries.get(action).map(AsRef::as_ref)
    }

    pub(crate) fn idempotency(&self) -> &Arc<IdempotencyStore> {
        &self.0.idempotency
    }
}

impl fmt::Debug for Router {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut names: Vec<_> = self.0.entries.keys().collect();
        names.sort();
        f.debug_tuple("Router").field(&names).finish()
    }
}

/// Registers handlers; see [`Router::builder`].
pub struct RouterBuilder<S> {
    state: Arc<S>,
    entries: HashMap<&'static str, Arc<Entry>>,
    idempotency: IdempotencyStore,
}

impl<S> fmt::Debug for RouterBuilder<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RouterBuilder").finish_non_exhaustive()
    }
}

impl<S: Send + Sync + 'static> RouterBuilder<S> {
    fn new(state: Arc<S>) -> Self {
        Self {
            state,
            entries: HashMap::new(),
            idempotency: IdempotencyStore::default(),
        }
    }

    /// Serves `A` with the handler of the state. Does not compile without one.
    pub fn on<A: Action>(mut self) -> Self
    where
        S: Handle<A>,
    {
        let state = Arc::clone(&self.state);
        let start = move |dispatch: Dispatch| -> HandlerFuture {
            Box::pin(dispatch.run::<A, S>(Arc::clone(&state)))
        };
        let entry = Entry {
            name: A::NAME,
            streams: streams::<A>(),
            start: Box::new(start),
        };
        self.entries.insert(A::NAME, Arc::new(entry));
        self
    }

    /// Adds the actions of `router` that this one does not serve itself.
    pub fn and(mut self, router: &Router) -> Self {
        for (name, entry) in &router.0.entries {
            self.entries
                .entry(name)
                .or_insert_with(|| Arc::clone(entry));
        }
        self
    }

    /// Returns the finished router.
    pub fn build(self) -> Router {
        Router(Arc::new(Inner {
            entries: self.entries,
            idempotency: Arc::new(self.idempotency),
        }))
    }
}

/// Declares a closed list of actions, with a function that makes a router.
///
/// The router does not compile unless the state handles **every** action of the list.
///
/// ```
/// use box_rpc::{Action, Call, Empty, Handle, Never, RpcError, contract};
///
/// pub struct Health;
/// impl Action for Health {
///     const NAME: &'static str = "health";
///     type Params = Empty;
///     type Result = Empty;
///     type Chunk = Never;
/// }
///
/// contract! {
///     /// What a server must answer.
///     pub Served: Health
/// }
///
/// struct Server;
/// impl Handle<Health> for Server {
///     async fn handle(&self, _: Empty, _: Call<Health>) -> Result<Empty, RpcError> {
///         Ok(Empty {})
///     }
/// }
/// let router = Served::router(std::sync::Arc::new(Server)).build();
/// assert_eq!(Served::NAMES, ["health"]);
/// ```
///
/// A state that lacks a handler is refused by the compiler:
///
/// ```compile_fail
/// # use box_rpc::{Action, Empty, Never, contract};
/// # pub struct Health;
/// # impl Action for Health {
/// #     const NAME: &'static str = "health";
/// #     type Params = Empty;
/// #     type Result = Empty;
/// #     type Chunk = Never;
/// # }
/// # contract! { /// What a server must answer.
/// # pub Served: Health }
/// struct Forgetful;
/// let router = Served::router(std::sync::Arc::new(Forgetful)).build();
/// ```
#[macro_export]
macro_rules! contract {
    ($(#[$doc:meta])* $vis:vis $name:ident: $($action:ty),+ $(,)?) => {
        $(#[$doc])*
        #[derive(Debug)]
        $vis struct $name;

        impl $name {
            /// Names of all its actions.
            pub const NAMES: &'static [&'static str] =
                &[$(<$action as $crate::Action>::NAME),+];

            /// Returns a router that serves all of them from `state`.
            pub fn router<S>(state: ::std::sync::Arc<S>) -> $crate::RouterBuilder<S>
            where
                S: $($crate::Handle<$action> +)+ Send + Sync + 'static,
            {
                $crate::Router::builder(state)$(.on::<$action>())+
            }
        }
    };
}
